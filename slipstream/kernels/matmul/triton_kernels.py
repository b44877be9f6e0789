"""The matmul in Triton, by pointers: any shape and strides, a tile a program.

    z = (a b) * scale_a * scale_b + bias        out = f(z) + residual

Few tiles do not fill a device. Then S programs have a tile, each an equal run of K's slices, and
leave float32 sums, which a second kernel adds up in their order. With PDL (sm_90 and later) its
programs are there before the first kernel's have ended, and wait for them.

Symbols: a [M, K], b [K, N], out [M, N]; tiles BM x BN, slices of BK. A_T, B_T: a's columns, b's
rows are what memory has one after the other, as [K, M] and [N, K]. Tiles go in groups of GROUP
rows of tiles, column by column, so that those at work at one time share what they read.

Launches do not synchronise. Memory beyond the result: S times as much in
float32 where K is split in S, and a copy of a factor neither of whose strides is 1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.matmul import config
from slipstream.runtime import backends, launch_cache


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "squared_relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        x = x * x
    elif ACTIVATION == "sigmoid":
        x = tl.sigmoid(x)
    elif ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
def _offsets(o_row, o_k, stride, T: tl.constexpr):
    """Offsets of a tile [rows, BK] whose rows are `stride` apart, or its columns with T."""
    # the stride's factor alone in 64 bits: what has neighbours in memory stays cheap
    if T:
        return o_row[:, None] + o_k.to(tl.int64)[None, :] * stride
    return o_row.to(tl.int64)[:, None] * stride + o_k[None, :]


@triton.jit
def _finish(
    b_acc, o_m, o_n, bias_ptr, r_ptr, sa_ptr, sb_ptr, out_ptr, M, N,
    r_stride, sa_stride, sb_stride, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Writes a tile of out."""
    m_m, m_n = o_m < M, o_n < N
    if sa_ptr is not None:
        b_acc *= tl.load(sa_ptr + o_m * sa_stride, mask=m_m, other=0.0)[:, None]
    if sb_ptr is not None:
        b_acc *= tl.load(sb_ptr + o_n * sb_stride, mask=m_n, other=0.0)[None, :]
    if bias_ptr is not None:
        b_acc += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    # all of it in float32, on registers that hold the product anyway: out is rounded once
    b_acc = _activate(b_acc, ACTIVATION)
    m = m_m[:, None] & m_n[None, :]
    if r_ptr is not None:
        p_r = r_ptr + _offsets(o_m, o_n, r_stride, False)
        b_acc += tl.load(p_r, mask=m, other=0.0).to(tl.float32)
    p_out = out_ptr + _offsets(o_m, o_n, N, False)
    tl.store(p_out, b_acc.to(out_ptr.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["M", "N", "K", "sa_stride", "sb_stride"])
def matmul_kernel(
    a_ptr, b_ptr, bias_ptr, r_ptr, sa_ptr, sb_ptr, out_ptr, M, N, K,
    a_stride, b_stride, r_stride, sa_stride, sb_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    A_T: tl.constexpr, B_T: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, S). out [M, N] contiguous, or with SPLIT the sums [S, M, N]; EVEN_*: a multiple
    of 16, so that masks keep loads wide. bias [N]; r [M, N] by rows; sa [M] or stride 0, sb [N] or
    stride 0."""
    # no change of value: tells the compiler that sizes are multiples of 16, so that loads are wide
    if EVEN_M:
        M = M // 16 * 16
    if EVEN_N:
        N = N // 16 * 16
    if EVEN_K:
        K = K // 16 * 16
    m_tiles, n_tiles = tl.cdiv(M, BM), tl.cdiv(N, BN)
    # tiles in groups of GROUP rows, column by column, for the L2 cache
    i, group = tl.program_id(0), GROUP * n_tiles
    first = i // group * GROUP
    rows = tl.minimum(m_tiles - first, GROUP)
    o_m = (first + i % group % rows) * BM + tl.arange(0, BM)
    o_n = i % group // rows * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    m_m, m_n = o_m < M, o_n < N
    p_a = a_ptr + _offsets(o_m, o_k, a_stride, A_T)
    p_b = b_ptr + tl.trans(_offsets(o_n, o_k, b_stride, not B_T))
    # from slice to slice by one addition: masks are made anew, addresses are not
    a_step = tl.cast(a_stride, tl.int64) * BK if A_T else BK
    b_step = BK if B_T else tl.cast(b_stride, tl.int64) * BK
    first_k, last_k = 0, K
    if SPLIT:
        # whole slices of K, so that only the last program's last one is masked
        slices_each = tl.cdiv(tl.cdiv(K, BK), tl.num_programs(1))
        first_k = tl.program_id(1) * slices_each
        p_a += first_k * a_step
        p_b += first_k * b_step
        first_k *= BK
        last_k = tl.minimum(first_k + slices_each * BK, K)
    b_acc = tl.zeros([BM, BN], tl.float32)
    for k in range(first_k, last_k, BK):
        m_k = o_k < K - k
        b_a = tl.load(p_a, mask=m_m[:, None] & m_k[None, :], other=0.0)
        b_b = tl.load(p_b, mask=m_k[:, None] & m_n[None, :], other=0.0)
        b_acc = tl.dot(b_a, b_b, b_acc, input_precision=PRECISION)
        p_a += a_step
        p_b += b_step
    # the sums' kernel may start: it waits for this one's end before it reads
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # a plane of sums for each split, not atomic additions: the same bits every time
    if SPLIT:
        out_ptr += tl.program_id(1).to(tl.int64) * M * N
        tl.store(out_ptr + _offsets(o_m, o_n, N, False), b_acc, mask=m_m[:, None] & m_n[None, :])
    else:
        _finish(
            b_acc, o_m, o_n, bias_ptr, r_ptr, sa_ptr, sb_ptr, out_ptr, M, N,
            r_stride, sa_stride, sb_stride, ACTIVATION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "N", "S", "sa_stride", "sb_stride"])
def matmul_sum_kernel(
    partial_ptr, bias_ptr, r_ptr, sa_ptr, sb_ptr, out_ptr, M, N, S,
    r_stride, sa_stride, sb_stride,
    BM: tl.constexpr, BN: tl.constexpr, MAX_SPLITS: tl.constexpr, EVEN_N: tl.constexpr,
    PDL: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """out from the sums [S, M, N], S <= MAX_SPLITS; grid (M / BM, N / BN)."""
    if EVEN_N:
        N = N // 16 * 16
    o_m = tl.program_id(0) * BM + tl.arange(0, BM)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    m = (o_m < M)[:, None] & (o_n < N)[None, :]
    p_partial = partial_ptr + _offsets(o_m, o_n, N, False)
    b_acc = tl.zeros([BM, BN], tl.float32)
    # addresses are ready by now; the sums are, once the first kernel has ended
    if PDL:
        tl.extra.cuda.gdc_wait()
    # in the order of the splits: the same bits every time
    for s in tl.static_range(MAX_SPLITS):
        b_acc += tl.load(p_partial + s * tl.cast(M, tl.int64) * N, mask=m & (s < S), other=0.0)
    _finish(
        b_acc, o_m, o_n, bias_ptr, r_ptr, sa_ptr, sb_ptr, out_ptr, M, N,
        r_stride, sa_stride, sb_stride, ACTIVATION,
    )  # fmt: skip


def matmul(t: config.MatmulInputs, c: config.MatmulConfig) -> Tensor:
    """out [M, N]."""
    (M, K), N = t.a.shape, t.b.shape[1]
    out = torch.empty(M, N, dtype=t.out_dtype, device=t.a.device)
    a, b = (x if 1 in x.stride() else x.contiguous() for x in (t.a, t.b))
    a_t, b_t = a.stride(1) != 1, b.stride(1) != 1
    # it is of float32 only, and another one would be another kernel
    precision = t.precision if a.dtype == torch.float32 else "tf32"
    if backends.INTERPRETED:
        precision = "ieee"
    tiles = -(-M // c.block_m) * -(-N // c.block_n)
    S = c.split_k
    tensors, strides = config.epilogue(t)
    fused, target, f = tensors, out, t.activation
    if S > 1:
        fused, f = dict.fromkeys(tensors), ""
        target = out.new_empty(S, M, N, dtype=torch.float32)
    overlaps = S > 1 and backends.supports_pdl(a.device)
    launch_cache.cached(matmul_kernel)[(tiles, S)](
        a_ptr=a,
        b_ptr=b,
        **fused,
        out_ptr=target,
        M=M,
        N=N,
        K=K,
        a_stride=a.stride(0 if not a_t else 1),
        b_stride=b.stride(0 if not b_t else 1),
        **strides,
        BM=c.block_m,
        BN=c.block_n,
        BK=c.block_k,
        GROUP=c.group_m,
        A_T=a_t,
        B_T=b_t,
        EVEN_M=M % 16 == 0,
        EVEN_N=N % 16 == 0,
        EVEN_K=K % 16 == 0,
        SPLIT=S > 1,
        PDL=overlaps,
        ACTIVATION=f,
        PRECISION=precision,
        num_warps=c.num_warps,
        num_stages=c.num_stages,
    )
    if S > 1:
        columns = 512  # of a row, which a program adds up
        launch_cache.cached(matmul_sum_kernel)[(M, -(-N // columns))](
            partial_ptr=target,
            **tensors,
            out_ptr=out,
            M=M,
            N=N,
            S=S,
            **strides,
            BM=1,
            BN=columns,
            MAX_SPLITS=config.MAX_SPLIT_K,
            EVEN_N=N % 16 == 0,
            PDL=overlaps,
            ACTIVATION=t.activation,
            num_warps=4,
            **({"launch_pdl": True} if overlaps else {}),
        )
    return out
