"""A persistent matmul for sm_90: one warp loads by TMA, two warpgroups multiply by wgmma.

    z = (a b) * scale_a * scale_b + bias        out = f(z) + residual

a [M, K], b [K, N], out [M, N]. A program takes every P-th tile of 128 x BN. Of a tile each
warpgroup has 64 rows; slices of BK of a and b go through a ring of STAGES, whose barriers are
`full`, from the loads, and `empty`, from both warpgroups. A product is waited for after the next
one was issued, so that the tensor cores always have one. The loads of a tile run ahead while the
one before it is written: 128 bytes of a row at a time, through two buffers a warpgroup.

Tiles go in groups of GROUP rows of tiles, column by column, so that those at work at one time
share what they read in the L2 cache. TMA leaves out what is beyond the edges, and reads 0 there.

An a of 32 bits goes through registers: wgmma takes it from shared memory along K only, and slower.
A b of them that memory has as [K, N] is the left factor of out^T = b^T a^T, with OUT_T.

Symbols: c warpgroup, i_m and i_n a tile's row and column, A_T and B_T: a or b^T is what memory
has row by row in the other order, a as [K, M] and b as [N, K].
"""

from slipstream.kernels.primitives.gluon_compat import (
    copy_in,
    copy_out,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _place(i, m_tiles, n_tiles, GROUP: gl.constexpr):
    """Row and column of tile i."""
    group = GROUP * n_tiles
    first = i // group * GROUP
    rows = gl.minimum(m_tiles - first, GROUP)
    return first + i % group % rows, i % group // rows


@gluon.jit
def _load(
    a_desc, b_desc, a_s, b_s, full, empty, M, N, K,
    BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    A_T: gl.constexpr, B_T: gl.constexpr,
):  # fmt: skip
    nbytes: gl.constexpr = 2 * a_desc.block_type.nbytes + b_desc.block_type.nbytes
    m_tiles, n_tiles, k_tiles = gl.cdiv(M, 128), gl.cdiv(N, BN), gl.cdiv(K, BK)
    step = 0
    for i in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        i_m, i_n = _place(i, m_tiles, n_tiles, GROUP)
        for i_k in range(k_tiles):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, nbytes)
            for c in gl.static_range(2):
                at = [i_k * BK, i_m * 128 + c * 64] if A_T else [i_m * 128 + c * 64, i_k * BK]
                copy_in(a_desc, at, bar, a_s.index(2 * s + c))
            at_b = [i_n * BN, i_k * BK] if B_T else [i_k * BK, i_n * BN]
            copy_in(b_desc, at_b, bar, b_s.index(s))
            step += 1


@gluon.jit
def _sigmoid(x):
    return 1 / (1 + gl.exp(-x))


@gluon.jit
def _activate(x, ACTIVATION: gl.constexpr):
    if ACTIVATION == "relu":
        x = gl.maximum(x, 0.0)
    elif ACTIVATION == "squared_relu":
        x = gl.maximum(x, 0.0)
        x = x * x
    elif ACTIVATION == "sigmoid":
        x = _sigmoid(x)
    elif ACTIVATION == "silu":
        x = x * _sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + gl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        x = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@gluon.jit
def _halves(b_x):
    """The left and the right columns; registers stay where they are."""
    rows: gl.constexpr = b_x.shape[0]
    half: gl.constexpr = b_x.shape[1] // 2
    return b_x.reshape((rows, 2, half)).permute((0, 2, 1)).split()


@gluon.jit
def _finish(
    b_x, buffer, out_desc, bias_ptr, r_ptr, sa_ptr, sb_ptr, row, col, M, N,
    r_stride, sa_stride, sb_stride, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Writes some columns of one warpgroup's rows, from (row, col) on."""
    layout: gl.constexpr = b_x.type.layout
    o_m = row + gl.arange(0, b_x.shape[0], gl.SliceLayout(1, layout))
    o_n = col + gl.arange(0, b_x.shape[1], gl.SliceLayout(0, layout))
    if sa_ptr is not None:
        b_x *= gl.load(sa_ptr + o_m * sa_stride, mask=o_m < M, other=0.0)[:, None]
    if sb_ptr is not None:
        b_x *= gl.load(sb_ptr + o_n * sb_stride, mask=o_n < N, other=0.0)[None, :]
    if bias_ptr is not None:
        b_x += gl.load(bias_ptr + o_n, mask=o_n < N, other=0.0).to(gl.float32)[None, :]
    b_x = _activate(b_x, ACTIVATION)
    if r_ptr is not None:
        p_r = r_ptr + o_m.to(gl.int64)[:, None] * r_stride + o_n[None, :]
        m = (o_m < M)[:, None] & (o_n < N)[None, :]
        b_x += gl.load(p_r, mask=m, other=0.0).to(gl.float32)
    # of this warpgroup's stores all but the last have left their buffer
    store_wait(1)
    buffer.store(b_x.to(out_desc.dtype))
    fence_async_shared()
    copy_out(out_desc, [row, col], buffer)


@gluon.jit
def _sum(
    c: gl.constexpr, a_s, b_s, full, empty, acc, step, k_tiles,
    STAGES: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
):  # fmt: skip
    """The products of a tile's slices, from `step` on."""
    for i_k in range(k_tiles):
        s = step % STAGES
        mbarrier.wait(full.index(s), (step // STAGES) & 1)
        a, b = a_s.index(2 * s + c), b_s.index(s)
        if A_T:
            a = a.permute((1, 0))
        if B_T:
            b = b.permute((1, 0))
        token = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(token,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=i_k > 0)
        step += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _left(
    c: gl.constexpr, a_s, full, step, STAGES: gl.constexpr, A_T: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """A slice of a in registers."""
    s = step % STAGES
    mbarrier.wait(full.index(s), (step // STAGES) & 1)
    a = a_s.index(2 * s + c)
    if A_T:
        a = a.permute((1, 0))
    return a.load(gl.DotOperandLayout(operand_index=0, parent=layout, k_width=1))


@gluon.jit
def _rounded(b_a):
    """As tf32, and once the last product is done: if what is loaded during one were the next one's
    operand itself, ptxas would wait for every instruction."""
    return gl.inline_asm_elementwise(
        "cvt.rna.tf32.f32 $0, $1;", "=r,r", [b_a], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _sum_through(
    c: gl.constexpr, a_s, b_s, full, empty, acc, step, k_tiles,
    STAGES: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """As _sum, with a through registers: the next slice of it is loaded during a product."""
    b_a = _left(c, a_s, full, step, STAGES, A_T, layout)
    for i_k in range(k_tiles):
        b = b_s.index((step + i_k) % STAGES)
        if B_T:
            b = b.permute((1, 0))
        token = warpgroup_mma(_rounded(b_a), b, acc, is_async=True)
        following = step + gl.minimum(i_k + 1, k_tiles - 1)
        b_a = _left(c, a_s, full, following, STAGES, A_T, layout)
        acc = warpgroup_mma_wait(0, deps=(token,))
        mbarrier.arrive(empty.index((step + i_k) % STAGES), count=1)
    return acc


@gluon.jit
def _multiply(
    c: gl.constexpr, out_desc, a_s, b_s, out_s, full, empty, bias_ptr, r_ptr, sa_ptr, sb_ptr,
    M, N, K, r_stride, sa_stride, sb_stride,
    BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    A_T: gl.constexpr, B_T: gl.constexpr, OUT_T: gl.constexpr, ACTIVATION: gl.constexpr,
    LEVELS: gl.constexpr,
):  # fmt: skip
    bits: gl.constexpr = a_s.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 256 // bits]
    )
    m_tiles, n_tiles, k_tiles = gl.cdiv(M, 128), gl.cdiv(N, BN), gl.cdiv(K, BK)
    step = 0
    for i in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        i_m, i_n = _place(i, m_tiles, n_tiles, GROUP)
        acc = gl.zeros([64, BN], gl.float32, layout)
        ring = a_s, b_s, full, empty
        if bits == 32:
            acc = _sum_through(c, *ring, acc, step, k_tiles, STAGES, A_T, B_T, layout)
        else:
            acc = _sum(c, *ring, acc, step, k_tiles, STAGES, A_T, B_T)
        step += k_tiles
        parts = (acc,)
        for _ in gl.static_range(LEVELS):
            halves = ()
            for j in gl.static_range(len(parts)):
                halves = halves + _halves(parts[j])
            parts = halves
        for j in gl.static_range(len(parts)):
            part, buffer = parts[j], out_s.index(2 * c + j % 2)
            row, col = i_m * 128 + c * 64, i_n * BN + j * (BN >> LEVELS)
            if OUT_T:
                _finish(
                    part.permute((1, 0)), buffer, out_desc, bias_ptr, r_ptr, sa_ptr, sb_ptr,  # pyright: ignore[reportAttributeAccessIssue]
                    col, row, N, M, r_stride, sa_stride, sb_stride, ACTIVATION,
                )  # fmt: skip
            else:
                _finish(
                    part, buffer, out_desc, bias_ptr, r_ptr, sa_ptr, sb_ptr,
                    row, col, M, N, r_stride, sa_stride, sb_stride, ACTIVATION,
                )  # fmt: skip
    store_wait(0)


@gluon.jit
def _first(
    out_desc, a_s, b_s, out_s, full, empty, bias_ptr, r_ptr, sa_ptr, sb_ptr,
    M, N, K, r_stride, sa_stride, sb_stride,
    BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    A_T: gl.constexpr, B_T: gl.constexpr, OUT_T: gl.constexpr, ACTIVATION: gl.constexpr,
    LEVELS: gl.constexpr,
):  # fmt: skip
    _multiply(
        0, out_desc, a_s, b_s, out_s, full, empty, bias_ptr, r_ptr, sa_ptr, sb_ptr,
        M, N, K, r_stride, sa_stride, sb_stride,
        BN, BK, GROUP, STAGES, A_T, B_T, OUT_T, ACTIVATION, LEVELS,
    )  # fmt: skip


@gluon.jit
def _second(
    out_desc, a_s, b_s, out_s, full, empty, bias_ptr, r_ptr, sa_ptr, sb_ptr,
    M, N, K, r_stride, sa_stride, sb_stride,
    BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    A_T: gl.constexpr, B_T: gl.constexpr, OUT_T: gl.constexpr, ACTIVATION: gl.constexpr,
    LEVELS: gl.constexpr,
):  # fmt: skip
    _multiply(
        1, out_desc, a_s, b_s, out_s, full, empty, bias_ptr, r_ptr, sa_ptr, sb_ptr,
        M, N, K, r_stride, sa_stride, sb_stride,
        BN, BK, GROUP, STAGES, A_T, B_T, OUT_T, ACTIVATION, LEVELS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "N", "K", "r_stride", "sa_stride", "sb_stride"])
def matmul_sm90_kernel(
    a_desc, b_desc, out_desc, bias_ptr, r_ptr, sa_ptr, sb_ptr,
    M, N, K, r_stride, sa_stride, sb_stride,
    BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    A_T: gl.constexpr, B_T: gl.constexpr, OUT_T: gl.constexpr, ACTIVATION: gl.constexpr,
    LEVELS: gl.constexpr,
):  # fmt: skip
    """Grid (P). Descriptors of [64, BK], [BK, BN] and [64, BN >> LEVELS], a's and b's the other
    way round with A_T and B_T. bias [N]; r [M, N] by rows; sa [M] or stride 0, sb [N] or 0.
    OUT_T: out, r, bias and scales are of the transpose, out's descriptor is [BN >> LEVELS, 64]."""
    a_s = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES] + a_desc.block_shape, a_desc.layout)
    b_s = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_shape, b_desc.layout)
    out_s = gl.allocate_shared_memory(out_desc.dtype, [4] + out_desc.block_shape, out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    gl.warp_specialize(
        [
            (_first, (
                out_desc, a_s, b_s, out_s, full, empty, bias_ptr, r_ptr, sa_ptr, sb_ptr,
                M, N, K, r_stride, sa_stride, sb_stride,
                BN, BK, GROUP, STAGES, A_T, B_T, OUT_T, ACTIVATION, LEVELS,
            )),
            (_second, (
                out_desc, a_s, b_s, out_s, full, empty, bias_ptr, r_ptr, sa_ptr, sb_ptr,
                M, N, K, r_stride, sa_stride, sb_stride,
                BN, BK, GROUP, STAGES, A_T, B_T, OUT_T, ACTIVATION, LEVELS,
            )),
            (_load, (
                a_desc, b_desc, a_s, b_s, full, empty, M, N, K,
                BN, BK, GROUP, STAGES, A_T, B_T,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
