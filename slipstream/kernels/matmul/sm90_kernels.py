"""A persistent matmul for sm_90, warp-specialised: TMA loads, wgmma products.

    z = (a b) * scale_a * scale_b + bias        out = f(z) + residual

a [M, K], b [K, N], out [M, N]. A program takes every P-th tile of 128 x BN.

    _load_partition, 1 warp         _multiply, c = 0 and 1: 4 warps and 64 rows of the tile each
      slices of a and b  -- full -->  acc += a b; the slice before is returned
      waits for empty                 arrive at empty
                                      the tile's epilogue: 128 bytes of a row at a time, through two
                                      buffers a warpgroup, by TMA to memory

    buffers            stages       arrivals a phase: full / empty
    a [64, BK] x 2     STAGES       1 (TMA), with b / 2
    b [BK, BN]         STAGES
    out [64, columns]  2 each       no barrier: store_wait

A product is waited for after the next one was issued, so that the tensor cores always have one. The
loads of a tile run ahead while the one before it is written.

Tiles go in groups of GROUP rows of tiles, column by column, so that those at work at one time
share what they read in the L2 cache. TMA skips what is beyond the edges, and reads 0 there.

A 32-bit a goes through registers: wgmma takes it from shared memory along K only, and slower.
A 32-bit b that memory has as [K, N] is the left factor of out^T = b^T a^T, with OUT_T.

Symbols: c warpgroup, i_m and i_n a tile's row and column, i_step the slice over all tiles; A_T and
B_T: a or b^T is what memory has row by row in the other order, a as [K, M] and b as [N, K].

The launch does not synchronise. Memory beyond the result: a copy of a factor that TMA or wgmma
cannot take as it is: one that does not begin at 16 bytes, one of 8 bits that is not adjacent along
K, and one if neither is of 32.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.matmul import config
from slipstream.kernels.primitives import persistent_gemm, sm90
from slipstream.kernels.primitives.sm90 import TensorDescriptor, gl, gluon, mbarrier, warpgroup_mma
from slipstream.runtime import backends, launch_cache


@gluon.jit
def _load_partition(
    a_desc, b_desc, a_s, b_s, full, empty, M, N, K,
    BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    A_T: gl.constexpr, B_T: gl.constexpr,
):  # fmt: skip
    # what one phase of `full` waits for: both warpgroups' a, and b
    nbytes: gl.constexpr = 2 * a_desc.block_type.nbytes + b_desc.block_type.nbytes
    m_tiles, n_tiles, k_tiles = gl.cdiv(M, 128), gl.cdiv(N, BN), gl.cdiv(K, BK)
    # counts on over tiles: the next one's slices are loaded while this one is written
    i_step = 0
    for i in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        i_m, i_n = persistent_gemm.locate_tile(i, m_tiles, n_tiles, GROUP)
        for i_k in range(k_tiles):
            stage, bar = persistent_gemm.begin_slice(full, empty, i_step, STAGES, nbytes)
            # 64 rows of a for each warpgroup; b is for both
            for c in gl.static_range(2):
                coords = [i_k * BK, i_m * 128 + c * 64] if A_T else [i_m * 128 + c * 64, i_k * BK]
                sm90.copy_in(a_desc, coords, bar, a_s.index(2 * stage + c))
            coords_b = [i_n * BN, i_k * BK] if B_T else [i_k * BK, i_n * BN]
            sm90.copy_in(b_desc, coords_b, bar, b_s.index(stage))
            i_step += 1


@gluon.jit
def _sigmoid(x):
    return 1 / (1 + gl.exp(-x))


@gluon.jit
def _activate(x, ACTIVATION: gl.constexpr):
    if ACTIVATION == "relu":
        x = gl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "squared_relu":
        x = gl.where(x < 0.0, 0.0, x)
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
    # in float32, from registers: out is rounded once, when it is stored
    b_x = _activate(b_x, ACTIVATION)
    if r_ptr is not None:
        p_r = r_ptr + o_m.to(gl.int64)[:, None] * r_stride + o_n[None, :]
        m = (o_m < M)[:, None] & (o_n < N)[None, :]
        b_x += gl.load(p_r, mask=m, other=0.0).to(gl.float32)
    persistent_gemm.write_tile(b_x, out_desc, buffer, row, col)


@gluon.jit
def _multiply_slices(
    c: gl.constexpr, a_s, b_s, full, empty, acc, i_step, k_tiles,
    STAGES: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr,
):  # fmt: skip
    """acc plus the products of a tile's slices, from `i_step` on."""
    for i_k in range(k_tiles):
        stage = persistent_gemm.wait_for_slice(full, i_step, STAGES)
        a, b = a_s.index(2 * stage + c), b_s.index(stage)
        if A_T:
            a = a.permute((1, 0))
        if B_T:
            b = b.permute((1, 0))
        token = warpgroup_mma(a, b, acc, is_async=True)
        # one product stays in flight; the slice of the one before has been read
        acc = sm90.warpgroup_mma_wait(1, deps=(token,))
        persistent_gemm.free_slice_before(empty, i_step, STAGES, i_k > 0)
        i_step += 1
    # the last slice too, before the sums are read
    acc = sm90.warpgroup_mma_wait(0, deps=(acc,))
    persistent_gemm.free_slice_before(empty, i_step, STAGES)
    return acc


@gluon.jit
def _load_a(
    c: gl.constexpr, a_s, full, i_step, STAGES: gl.constexpr, A_T: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """A slice of a in registers."""
    a = a_s.index(2 * persistent_gemm.wait_for_slice(full, i_step, STAGES) + c)
    if A_T:
        a = a.permute((1, 0))
    return a.load(gl.DotOperandLayout(operand_index=0, parent=layout, k_width=1))


@gluon.jit
def _rounded(b_a):
    """Rounds to tf32, after the last product is done: if what is loaded during a product were the
    next operand itself, ptxas would wait after every wgmma."""
    return gl.inline_asm_elementwise(
        "cvt.rna.tf32.f32 $0, $1;", "=r,r", [b_a], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _multiply_slices_rs(
    c: gl.constexpr, a_s, b_s, full, empty, acc, i_step, k_tiles,
    STAGES: gl.constexpr, A_T: gl.constexpr, B_T: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """As _multiply_slices, with a through registers: its next slice is loaded during a product."""
    b_a = _load_a(c, a_s, full, i_step, STAGES, A_T, layout)
    for i_k in range(k_tiles):
        b = b_s.index((i_step + i_k) % STAGES)
        if B_T:
            b = b.permute((1, 0))
        token = warpgroup_mma(_rounded(b_a), b, acc, is_async=True)
        # after the last slice it again, rather than a branch: its buffer is freed below
        next_step = i_step + gl.minimum(i_k + 1, k_tiles - 1)
        b_a = _load_a(c, a_s, full, next_step, STAGES, A_T, layout)
        acc = sm90.warpgroup_mma_wait(0, deps=(token,))
        mbarrier.arrive(empty.index((i_step + i_k) % STAGES), count=1)
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
    i_step = 0
    for i in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        i_m, i_n = persistent_gemm.locate_tile(i, m_tiles, n_tiles, GROUP)
        # a warpgroup has 64 rows of the tile and all its columns: b is read by both from one copy
        acc = gl.zeros([64, BN], gl.float32, layout)
        ring = a_s, b_s, full, empty
        if bits == 32:
            acc = _multiply_slices_rs(c, *ring, acc, i_step, k_tiles, STAGES, A_T, B_T, layout)
        else:
            acc = _multiply_slices(c, *ring, acc, i_step, k_tiles, STAGES, A_T, B_T)
        i_step += k_tiles
        # 2 ** LEVELS blocks of columns, each in one of two buffers while the other is being stored
        column_blocks = (acc,)
        for _ in gl.static_range(LEVELS):
            narrower = ()
            for j in gl.static_range(len(column_blocks)):
                narrower = narrower + persistent_gemm.halves(column_blocks[j])
            column_blocks = narrower
        for j in gl.static_range(len(column_blocks)):
            columns, buffer = column_blocks[j], out_s.index(2 * c + j % 2)
            row, col = i_m * 128 + c * 64, i_n * BN + j * (BN >> LEVELS)
            # the product of the transposes: rows and columns change places only here
            if OUT_T:
                _finish(
                    columns.permute((1, 0)), buffer, out_desc, bias_ptr, r_ptr, sa_ptr, sb_ptr,  # pyright: ignore[reportAttributeAccessIssue]
                    col, row, N, M, r_stride, sa_stride, sb_stride, ACTIVATION,
                )  # fmt: skip
            else:
                _finish(
                    columns, buffer, out_desc, bias_ptr, r_ptr, sa_ptr, sb_ptr,
                    row, col, M, N, r_stride, sa_stride, sb_stride, ACTIVATION,
                )  # fmt: skip
    # shared memory is to outlive the last stores
    sm90.store_wait(0)


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
    full, empty = persistent_gemm.alloc_ring_barriers(STAGES)
    gl.warp_specialize(
        [
            (_multiply, (
                0, out_desc, a_s, b_s, out_s, full, empty, bias_ptr, r_ptr, sa_ptr, sb_ptr,
                M, N, K, r_stride, sa_stride, sb_stride,
                BN, BK, GROUP, STAGES, A_T, B_T, OUT_T, ACTIVATION, LEVELS,
            )),
            (_multiply, (
                1, out_desc, a_s, b_s, out_s, full, empty, bias_ptr, r_ptr, sa_ptr, sb_ptr,
                M, N, K, r_stride, sa_stride, sb_stride,
                BN, BK, GROUP, STAGES, A_T, B_T, OUT_T, ACTIVATION, LEVELS,
            )),
            (_load_partition, (
                a_desc, b_desc, a_s, b_s, full, empty, M, N, K,
                BN, BK, GROUP, STAGES, A_T, B_T,
            )),
        ],
        # warps and registers a thread: what one warp that loads leaves over holds 64 x BN sums
        [4, 1],
        [240, 24],
    )  # fmt: skip


_GLUON = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}
# of 12 warps, of which the compiler takes 9; the two warpgroups then take 240, the loads 24
REGISTERS = 168


def matmul(t: config.MatmulInputs, c: config.MatmulConfig) -> Tensor:
    """out [M, N]."""
    (M, K), N = t.a.shape, t.b.shape[1]
    out = torch.empty(M, N, dtype=t.out_dtype, device=t.a.device)
    # the left factor [M, K] and the right one's transpose [N, K], or what is their transpose
    lhs, rhs, swapped = t.a, t.b.t(), config.tma_swaps(t)
    if swapped:
        lhs, rhs, M, N = rhs, lhs, N, M
    size = lhs.element_size()
    lhs, lhs_t = _align_for_tma(lhs, size in (2, 4))
    rhs, rhs_t = _align_for_tma(rhs, size == 2)
    tensors, strides = config.epilogue(t)
    BN, BK = c.block_n, c.block_k
    levels = config.column_levels(BN, out.element_size())
    out_block = (BN >> levels, 64) if swapped else (64, BN >> levels)
    tiles = -(-M // 128) * -(-N // BN)
    launch_cache.cached(matmul_sm90_kernel)[(min(tiles, backends.sm_count(out.get_device())),)](
        a_desc=_descriptor(lhs, (BK, 64) if lhs_t else (64, BK)),
        b_desc=_descriptor(rhs, (BK, BN) if rhs_t else (BN, BK)),
        out_desc=_descriptor(out, out_block),
        **tensors,
        M=M,
        N=N,
        K=K,
        **strides,
        BN=BN,
        BK=BK,
        GROUP=c.group_m,
        STAGES=c.num_stages,
        A_T=lhs_t,
        B_T=not rhs_t,
        OUT_T=swapped,
        ACTIVATION=t.activation,
        LEVELS=levels,
        num_warps=4,
        maxnreg=REGISTERS,
    )
    return out


def _align_for_tma(x: Tensor, may_transpose: bool) -> tuple[Tensor, bool]:
    """x [rows, K] as its rows, or if it may be as its columns [K, rows]; and which."""
    transposed = may_transpose and not config.row_by_row(x) and config.row_by_row(x.t())
    if transposed:
        x = x.t()
    if not config.row_by_row(x) or x.data_ptr() % 16:
        # not .contiguous(), which leaves alone what is contiguous but badly placed
        x = x.clone(memory_format=torch.contiguous_format)
    return x, transposed


def _descriptor(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    layout = _layout(x.dtype, block)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)


@launch_cache.cache
def _layout(dtype: torch.dtype, block: tuple[int, int]) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON[dtype])
