"""Delta rule, no decay or one a token, on sm_90: the inverses of all chunks' triangles.

    L[i, j] = [i = j] + [i > j] (k_i . k_j) exp(G_i - G_j) beta_j        R = L^-1        [C, C]

by the steps of the portable delta_solve.py: blocks of 16 rows on the diagonal by substitution, then
X - X M X twice, with M those blocks of L that join pairs. X has blocks on its diagonal alone, so
that X M is the same blocks of X L, of which X's columns in odd blocks are all that counts, and then
those of X M in even ones. Here the rows of a block lie in a thread and the columns in lanes, so
that a step of the substitution exchanges one number a thread; products take both halves of their
operands, and those on the right of a level are in shared memory before its first product.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportUnboundVariable=false

from slipstream.kernels.gluon import (
    copy_in,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from slipstream.kernels.linear.hopper.parts import clear, end_ring, place, ring, write

LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-128.0)


@gluon.jit
def halves(b):
    """b cut to bf16, and the rest of it, rounded."""
    high = (b.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (b - high).to(gl.bfloat16)


@gluon.jit
def columns(b, aa: gl.constexpr, ODD: gl.constexpr, LEVEL: gl.constexpr, C: gl.constexpr):
    """The two left operands [C, 16] of columns in odd blocks of 16 << LEVEL, or in even ones."""
    b = gl.permute(gl.reshape(b, [C, 2, 2, C // 4]), (0, 3, 2, 1) if LEVEL else (0, 3, 1, 2))
    b_even, b_odd = gl.split(b)
    b_0, b_1 = gl.split(b_odd if ODD else b_even)
    return gl.convert_layout(b_0, aa), gl.convert_layout(b_1, aa)


@gluon.jit
def product(
    high, low, right_high, right_low, b, aa: gl.constexpr, ODD: gl.constexpr, LEVEL: gl.constexpr,
    ADD: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Left by right in float32, but for 2^-16 of it or less; on top of b if ADD.

    Of left only the columns in odd blocks, or even ones, count: the others are zero, or of no use.
    """
    BASE: gl.constexpr = C // 4
    first: gl.constexpr = (BASE << LEVEL) * ODD
    second: gl.constexpr = first + (BASE if LEVEL else 2 * BASE)
    high_0, high_1 = columns(high, aa, ODD, LEVEL, C)
    low_0, low_1 = columns(low, aa, ODD, LEVEL, C)
    high_b0 = right_high.slice(first, BASE)
    high_b1 = right_high.slice(second, BASE)
    b = warpgroup_mma(high_0, right_low.slice(first, BASE), b, use_acc=ADD, is_async=True)
    b = warpgroup_mma(high_1, right_low.slice(second, BASE), b, is_async=True)
    b = warpgroup_mma(low_0, high_b0, b, is_async=True)
    b = warpgroup_mma(low_1, high_b1, b, is_async=True)
    b = warpgroup_mma(high_0, high_b0, b, is_async=True)
    b = warpgroup_mma(high_1, high_b1, b, is_async=True)
    return warpgroup_mma_wait(0, deps=(b,))


@gluon.jit
def invert_blocks(b_a, block, NB: gl.constexpr, BASE: gl.constexpr):
    """Inverses of the blocks of BASE rows on the diagonal of I + b_a, in their place."""
    wide: gl.constexpr = gl.BlockedLayout(
        [1, BASE // 2, NB, 1], [1, 2, 1, BASE], [4, 1, 1, 1], [3, 2, 1, 0]
    )
    xl: gl.constexpr = gl.SliceLayout(2, wide)  # [NB, row, column]
    row_layout: gl.constexpr = gl.SliceLayout(2, xl)
    o_block = gl.arange(0, NB, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, wide))))
    o_other = gl.arange(0, NB, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, wide))))
    own = o_block[:, None, None, None] == o_other[None, None, :, None]
    b_d = gl.convert_layout(gl.reshape(b_a, [NB, BASE, NB, BASE]), wide)
    b_d = gl.sum(gl.where(own, b_d, 0.0), 2)
    block.store(gl.permute(b_d, (1, 0, 2)))
    gl.thread_barrier()
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    rows = block._reinterpret(gl.float32, [BASE, NB, BASE], flat)  # the same, to be indexed
    o_row = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(2, xl)))[None, :, None]
    o_column = gl.arange(0, BASE, gl.SliceLayout(0, gl.SliceLayout(1, xl)))[None, None, :]
    b_x = gl.where(o_row == o_column, 1.0, gl.zeros([NB, BASE, BASE], gl.float32, xl))
    for i in gl.static_range(1, BASE):
        b_row = rows.index(i).load(row_layout)  # [NB, BASE]
        b_new = gl.sum(b_row[:, :, None] * b_x, 1)
        b_x = gl.where(o_row == i, b_x - b_new[:, None, :], b_x)
    b_x = gl.where(own, b_x[:, :, None, :], 0.0)
    return gl.convert_layout(gl.reshape(b_x, [NB * BASE, NB * BASE]), b_a.type.layout)


@gluon.jit
def growth(b_a, b_beta, o_i, o_j, BASE: gl.constexpr):
    """log2 of how much longer the products of 16 tokens' I - beta k k^T each make a state at most.

    0 for keys of norm 1 and beta up to 2: what gates leave of a state is bounded by that.
    """
    b_k = gl.sum(gl.where(o_i[:, None] == o_j[None, :], b_a, 0.0), 1)
    b_grow = gl.log2(gl.maximum(gl.abs(b_beta * b_k - 1.0), 1.0))
    return gl.sum(gl.reshape(b_grow, [b_grow.shape[0] // BASE, BASE]), 1)


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def fast_exp2(b):
    """0 where that is not a normal number: four instructions less."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [b], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit(do_not_specialize=["T", "N", "HV", "H"])
def delta_solve_sm90_kernel(
    k_desc,  # [tokens, H * K] by [C, K]
    r_desc,  # [tokens, HV * C] by [C, C]
    r_ptr,
    g_ptr,  # [tokens, HV]
    beta_ptr,  # [tokens, HV]
    rows_ptr,  # [chunks, HV, 1 + HAS_GATE, C]: beta, G of base 2
    growth_ptr,  # [chunks, HV, C // BASE], if there are gates
    cu_ptr,  # [N + 1]
    T,
    N,
    HV,
    H,
    K: gl.constexpr,
    C: gl.constexpr,
    BASE: gl.constexpr,
    HAS_GATE: gl.constexpr,
    PACKED: gl.constexpr,
):
    """grid (chunks * HV,), 4 warps: one program inverts one chunk of one value head."""
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    aa: gl.constexpr = gl.DotOperandLayout(0, al, 2)
    m_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    line: gl.constexpr = gl.BlockedLayout([C // 32], [32], [4], [0])
    ks = gl.allocate_shared_memory(k_desc.dtype, [C, K], k_desc.layout)
    ms = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], m_shared)
    block = gl.allocate_shared_memory(gl.float32, [BASE, C // BASE, BASE], plain)
    betas = gl.allocate_shared_memory(gl.float32, [C], flat)
    bar = ring(1, 1)
    pid = gl.program_id(0)
    i_h = pid % HV
    # a chunk is a segment of C tokens
    row, left, _ = place(cu_ptr, pid // HV, T, N, C, C, PACKED, True)
    mbarrier.expect(bar.index(0), k_desc.block_type.nbytes)
    copy_in(k_desc, [row, i_h // (HV // H) * K], bar.index(0), ks)
    o_t = gl.arange(0, C, line)
    p_rows = rows_ptr + pid.to(gl.int64) * ((1 + HAS_GATE) * C)
    o_x = (row + o_t).to(gl.int64) * HV + i_h
    b_x = gl.load(beta_ptr + o_x, mask=o_t < left, other=0.0).to(gl.float32)
    betas.store(b_x)
    gl.store(p_rows + o_t, b_x)
    if HAS_GATE:
        sums = gl.allocate_shared_memory(gl.float32, [C], flat)
        b_g = gl.load(g_ptr + o_x, mask=o_t < left, other=0.0).to(gl.float32)
        b_G = gl.associative_scan(gl.where(b_g < LOWEST, LOWEST, b_g) * LOG2E, 0, add)
        sums.store(b_G)
        gl.store(p_rows + C + o_t, b_G)
    gl.thread_barrier()
    mbarrier.wait(bar.index(0), 0)
    if left < C:
        clear(ks, left, C, K)
        fence_async_shared()
        gl.thread_barrier()
    zero = gl.zeros([C, C], gl.float32, al)
    b_a = warpgroup_mma(ks, ks.permute((1, 0)), zero, use_acc=False, is_async=True)
    o_i = gl.arange(0, C, gl.SliceLayout(1, al))
    o_j = gl.arange(0, C, gl.SliceLayout(0, al))
    seen = o_i[:, None] > o_j[None, :]
    b_beta = betas.load(gl.SliceLayout(0, al))[None, :]
    if HAS_GATE:
        G_i = sums.load(gl.SliceLayout(1, al))
        G_j = sums.load(gl.SliceLayout(0, al))
        b_beta *= fast_exp2(gl.minimum(G_i[:, None] - G_j[None, :], 0.0))
    b_a = warpgroup_mma_wait(0, deps=(b_a,))
    if HAS_GATE:
        b_grow = growth(b_a, betas.load(gl.SliceLayout(1, al)), o_i, o_j, BASE)
        o_b = gl.arange(0, C // BASE, b_grow.type.layout)
        gl.store(growth_ptr + pid * (C // BASE) + o_b, b_grow)
    b_a = gl.where(seen, b_a * b_beta, 0.0)
    a_high, a_low = halves(b_a)
    ms.index(0).store(a_high)
    ms.index(1).store(a_low)
    b_x = invert_blocks(b_a, block, C // BASE, BASE)
    xs = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], m_shared)
    for level in gl.static_range(2):
        r_block = (o_i // (BASE << level))[:, None]
        below = (r_block == (o_j // (BASE << level))[None, :] + 1) & (r_block % 2 == 1)
        x_high, x_low = halves(b_x)
        gl.thread_barrier()
        xs.index(0).store(x_high)
        xs.index(1).store(x_low)
        fence_async_shared()
        gl.thread_barrier()
        b_p = product(x_high, x_low, ms.index(0), ms.index(1), zero, aa, 1, level, False, C)
        p_high, p_low = halves(gl.where(below, -b_p, 0.0))
        b_x = product(p_high, p_low, xs.index(0), xs.index(1), b_x, aa, 0, level, True, C)
    out = gl.allocate_shared_memory(r_desc.dtype, [C, C], r_desc.layout)
    out.store(b_x.to(r_desc.dtype))
    fence_async_shared()
    gl.thread_barrier()
    write(r_desc, r_ptr, out, row, i_h * C, HV * C, left, C, C)
    end_ring(bar)
    store_wait(0)
