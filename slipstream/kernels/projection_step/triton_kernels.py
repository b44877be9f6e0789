"""Linear layers of a few rows: every weight is read once, and that is all the time there is.

    x' = x norm_weight / sqrt(mean x^2 + eps), or x
    y_i = x' W_i^T + b_i                 of up to five weights, side by side
    y = silu(y_0) y_1                    GLU
    y = y + residual

A program has BN rows of one weight. One row of x is multiplied without tensor cores; its norm is
taken along the way, the products divided by the root of its squares' mean at the end. Of several
rows y_i is rounded, as a linear layer's result is, so that bits are those of the layers apart.
Or a program has a share of K, and y is partial sums in float32, which a second kernel adds up, with
the residual and the next norm. Memory beyond the result: these sums.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.primitives import device, norm_options
from slipstream.kernels.projection_step import inputs
from slipstream.runtime import backends, launch_cache


@triton.jit
def _moved(
    block, N, column, weight_ptr, bias_ptr, has_bias, next_N, next_weight_ptr, next_bias_ptr,
    BN: tl.constexpr,
):  # fmt: skip
    """To the next weight if the block is behind this one's."""
    blocks = tl.cdiv(N, BN)
    if block >= blocks:
        block -= blocks
        column += N
        N = next_N
        weight_ptr = next_weight_ptr
        if next_bias_ptr is not None:
            bias_ptr, has_bias = next_bias_ptr, 1
        else:
            has_bias = 0
    return block, N, column, weight_ptr, bias_ptr, has_bias


@triton.jit
def _part(
    x_ptr, norm_weight_ptr, weight_ptr, up_ptr, o_n, m_n, o_k, products, ups, squares,
    K: tl.constexpr, NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr, GLU: tl.constexpr,
):  # fmt: skip
    """Adds the products of some columns."""
    m_k = o_k < K
    m_w = m_n[:, None] & m_k[None, :]
    p_w = o_n[:, None].to(tl.int64) * K + o_k[None, :]
    b_w = tl.load(weight_ptr + p_w, mask=m_w, other=0.0)
    if GLU:
        b_u = tl.load(up_ptr + p_w, mask=m_w, other=0.0)
    b_x = tl.load(x_ptr + o_k, mask=m_k, other=0.0).to(tl.float32)
    if NORM:
        squares += b_x * b_x
        if norm_weight_ptr is not None:
            b_g = tl.load(norm_weight_ptr + o_k, mask=m_k, other=0.0).to(tl.float32)
            b_x *= 1.0 + b_g if ZERO_CENTERED else b_g
    products += b_w.to(tl.float32) * b_x[None, :]
    if GLU:
        ups += b_u.to(tl.float32) * b_x[None, :]
    return products, ups, squares


@triton.jit
def _row(
    x_ptr, norm_weight_ptr, weight_ptr, up_ptr, o_n, m_n, eps, K: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    GLU: tl.constexpr,
):  # fmt: skip
    """Products [BN, 1] of one row with a weight and with the second."""
    products, squares = tl.zeros([BN, BK], tl.float32), tl.zeros([BK], tl.float32)
    ups = products
    if K <= 4 * BK:  # all loads are on their way before the first is awaited
        for k in tl.static_range(0, K, BK):
            products, ups, squares = _part(
                x_ptr, norm_weight_ptr, weight_ptr, up_ptr, o_n, m_n, k + tl.arange(0, BK),
                products, ups, squares, K, NORM, ZERO_CENTERED, GLU,
            )  # fmt: skip
    else:
        for k in range(0, K, BK):
            products, ups, squares = _part(
                x_ptr, norm_weight_ptr, weight_ptr, up_ptr, o_n, m_n, k + tl.arange(0, BK),
                products, ups, squares, K, NORM, ZERO_CENTERED, GLU,
            )  # fmt: skip
    acc, up = tl.sum(products, 1), tl.sum(ups, 1)
    if NORM:
        rstd = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        acc *= rstd
        up *= rstd
    return acc[:, None], up[:, None]


@triton.jit
def _rows(
    x_ptr, weight_ptr, up_ptr, o_m, m_m, row_x, o_n, m_n, first, K: tl.constexpr,
    COLUMNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GLU: tl.constexpr, X_LEFT: tl.constexpr,
):  # fmt: skip
    """The same of BM rows, [BN, BM], over COLUMNS columns from the first on."""
    acc = tl.zeros([BM, BN] if X_LEFT else [BN, BM], tl.float32)
    up = acc
    for k in range(0, COLUMNS, BK):
        o_k = first + k + tl.arange(0, BK)
        m_k = o_k < K
        m_w = m_n[:, None] & m_k[None, :]
        p_w = o_n[:, None].to(tl.int64) * K + o_k[None, :]
        b_w = tl.load(weight_ptr + p_w, mask=m_w, other=0.0)
        m_x = m_k[:, None] & m_m[None, :]
        b_x = tl.load(x_ptr + o_m[None, :] * row_x + o_k[:, None], mask=m_x, other=0.0)
        b_x = b_x.to(b_w.dtype)
        acc = _added(b_w, b_x, acc, X_LEFT)
        if GLU:
            up = _added(tl.load(up_ptr + p_w, mask=m_w, other=0.0), b_x, up, X_LEFT)
    if X_LEFT:
        acc, up = tl.trans(acc), tl.trans(up)
    return acc, up


@triton.jit
def _added(b_w, b_x, acc, X_LEFT: tl.constexpr):
    if X_LEFT:
        acc = tl.dot(tl.trans(b_x), tl.trans(b_w), acc, input_precision="ieee")
    else:  # what is padded is the side of x, which has few rows
        acc = tl.dot(b_w, b_x, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["M"])
def projection_step_kernel(
    x_ptr,  # [M, K]
    w0_ptr,  # [N0, K]
    w1_ptr, w2_ptr, w3_ptr, w4_ptr,
    b0_ptr,  # [N0]
    b1_ptr, b2_ptr, b3_ptr, b4_ptr,
    norm_weight_ptr,  # [K]
    residual_ptr,  # [M, N]
    y_ptr,  # [M, N]
    eps,
    M: tl.int32,
    N0, N1, N2, N3, N4, row_x, row_y, row_residual,
    K: tl.constexpr,
    ONE: tl.constexpr,  # M is 1
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, GLU: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a share of K, a multiple of BK, or K
    X_LEFT: tl.constexpr,  # of several rows, in 16 bits
    PDL: tl.constexpr = False,
    PREFETCH: tl.constexpr = False,  # rows of the weights are whole numbers of 16 bytes
):  # fmt: skip
    """grid (blocks of the weights' rows, shares of K). Of several shares y is [shares, M, N] in
    float32, without the residual."""
    block, N, column, weight_ptr, bias_ptr, has_bias = tl.program_id(0), N0, 0, w0_ptr, w0_ptr, 0
    if b0_ptr is not None:
        bias_ptr, has_bias = b0_ptr, 1
    if not GLU:
        if w1_ptr is not None:
            block, N, column, weight_ptr, bias_ptr, has_bias = _moved(
                block, N, column, weight_ptr, bias_ptr, has_bias, N1, w1_ptr, b1_ptr, BN
            )
        if w2_ptr is not None:
            block, N, column, weight_ptr, bias_ptr, has_bias = _moved(
                block, N, column, weight_ptr, bias_ptr, has_bias, N2, w2_ptr, b2_ptr, BN
            )
        if w3_ptr is not None:
            block, N, column, weight_ptr, bias_ptr, has_bias = _moved(
                block, N, column, weight_ptr, bias_ptr, has_bias, N3, w3_ptr, b3_ptr, BN
            )
        if w4_ptr is not None:
            block, N, column, weight_ptr, bias_ptr, has_bias = _moved(
                block, N, column, weight_ptr, bias_ptr, has_bias, N4, w4_ptr, b4_ptr, BN
            )
    o_n = block * BN + tl.arange(0, BN)
    if PREFETCH:
        row: tl.constexpr = K * w0_ptr.dtype.element_ty.primitive_bitwidth // 8
        o_w = tl.minimum(o_n, N - 1).to(tl.int64) * K
        device.prefetch(weight_ptr + o_w, row)
        if GLU:
            device.prefetch(w1_ptr + o_w, row)
    device.wait_for_earlier(PDL)
    o_m = tl.arange(0, BM)
    m_n, m_m = o_n < N, o_m < M
    first = 0
    if COLUMNS < K:
        first = tl.program_id(1) * COLUMNS
        y_ptr += tl.program_id(1) * M * row_y
    if ONE:
        acc, up = _row(
            x_ptr, norm_weight_ptr, weight_ptr, w1_ptr, o_n, m_n, eps, K,
            BN, BK, NORM, ZERO_CENTERED, GLU,
        )  # fmt: skip
    else:
        acc, up = _rows(
            x_ptr, weight_ptr, w1_ptr, o_m, m_m, row_x, o_n, m_n, first, K, COLUMNS,
            BM, BN, BK, GLU, X_LEFT,
        )  # fmt: skip
    m_b = m_n & (has_bias != 0)
    if COLUMNS < K:
        m_b &= first == 0
    acc += tl.load(bias_ptr + o_n, mask=m_b, other=0.0).to(tl.float32)[:, None]
    if not ONE and COLUMNS >= K:
        acc = acc.to(w0_ptr.dtype.element_ty).to(tl.float32)
    if GLU:
        if b1_ptr is not None:
            up += tl.load(b1_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        if not ONE:
            up = up.to(w0_ptr.dtype.element_ty).to(tl.float32)
        acc = acc * tl.sigmoid(acc) * up
        if not ONE:
            acc = acc.to(w0_ptr.dtype.element_ty).to(tl.float32)
    m_y = m_n[:, None] & m_m[None, :]
    o_y = column + o_n[:, None]
    if residual_ptr is not None:
        p_r = residual_ptr + o_m[None, :] * row_residual + o_y
        acc += tl.load(p_r, mask=m_y, other=0.0).to(tl.float32)
    tl.store(y_ptr + o_m[None, :] * row_y + o_y, acc.to(y_ptr.dtype.element_ty), mask=m_y)


@triton.jit(do_not_specialize=["M"])
def projection_sums_kernel(
    partial_ptr,  # [S, M, N]
    residual_ptr,  # [M, N]
    norm_weight_ptr,  # [N]
    h_ptr,  # [M, N]
    y_ptr,  # [M, N]
    eps,
    M: tl.int32,
    row_residual,
    N: tl.constexpr,
    S: tl.constexpr,
    BS: tl.constexpr,
    BN: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """grid (M)"""
    device.wait_for_earlier(PDL)
    row = tl.program_id(0)
    o = tl.arange(0, BN)
    m = o < N
    b_r = tl.load(residual_ptr + row * row_residual + o, mask=m, other=0.0).to(tl.float32)
    b_g = tl.load(norm_weight_ptr + o, mask=m, other=0.0).to(tl.float32)
    # all on their way at once, and added up in one order: no bit depends on which was first
    o_s = tl.arange(0, BS)
    p = partial_ptr + (o_s[:, None] * M + row) * N + o[None, :]
    acc = tl.sum(tl.load(p, mask=(o_s < S)[:, None] & m[None, :], other=0.0), 0)
    # rounded as a linear layer's result is, and its sum with the residual as the norm reads it
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    b_h = (acc.to(dtype).to(tl.float32) + b_r).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + row * N + o, b_h, mask=m)
    b_z = b_h.to(dtype).to(tl.float32)
    b_z *= tl.rsqrt(tl.sum(b_z * b_z, 0) / N + eps)
    b_y = b_z * (1.0 + b_g if ZERO_CENTERED else b_g)
    tl.store(y_ptr + row * N + o, b_y.to(dtype), mask=m)


@dataclass(frozen=True)
class ProjectionTile:
    """BN rows of a weight a program, BK of their columns at a time, of BM rows of x.

    x_left: whether x is the left operand, whose BM rows are then those of a wgmma.
    """

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int
    x_left: bool = False


def tile_of(M: int, N: int, K: int, x_bytes: int, w_bytes: int, shared: int) -> ProjectionTile:
    """The tile, with as many columns of x at a time as fit into `shared` bytes of shared memory.

    N: rows of all weights, or of one of two that gate each other. x_bytes, w_bytes: bytes of an
        element of x and of the weights, of both where two gate each other.
    """
    if M == 1:
        return ProjectionTile(1, 8, min(1024, _power(K)), 8, 3)
    BM, BN = max(16, min(64, _power(M))), 32 if N >= 2048 else 16
    # of few rows loads alone take the time, and a program of one weight has room for more of them
    stages = 6 if BM == 16 and BN == 32 and w_bytes == x_bytes else 4
    BK = max(16, min(128 if BN == 32 else 256, _power(K)))
    while (stages - 1) * BK * (BM * x_bytes + BN * w_bytes) > shared and BK > 16:
        BK //= 2
    return ProjectionTile(BM, BN, BK, 4, stages)


def tile_of_many(N: int, K: int, weights: int, shared: int) -> ProjectionTile:
    """The tile for 33 to 64 rows of 16 bits on sm_90 and later.

    weights: 2 where two gate each other. One program a multiprocessor is enough, whose x and
    weights are on their way in `stages` parts.
    """
    BN, BK, stages = 32, max(16, min(128, _power(K))), 5
    while stages * BK * 2 * (64 + BN * weights) > shared:
        stages -= 1
    return ProjectionTile(64, BN, BK, 4, stages, True)


def tile_of_shares(K: int) -> tuple[ProjectionTile, int]:
    """The tile of a product by shares of K, and how many: about a program a multiprocessor."""
    if K > 2048:
        return ProjectionTile(64, 64, 128, 4, 3), 8
    return ProjectionTile(64, 32, 64, 4, 4), 4


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _in_words(t: inputs.ProjectionInputs) -> bool:
    """Whether all rows of the weights are whole words of 16 bytes."""
    row = t.weights[0].shape[1] * t.weights[0].element_size()
    return row % 16 == 0 and all(w.data_ptr() % 16 == 0 for w in t.weights)


def projection_step(t: inputs.ProjectionInputs) -> Tensor:
    M, K = t.x.shape
    y = torch.empty(M, t.size, dtype=t.out_dtype, device=t.x.device)
    x_bytes, w_bytes = t.x.element_size(), t.weights[0].element_size()
    shared = backends.shared_memory_bytes(t.x.get_device())
    if t.is_wide and backends.supports_pdl(t.x.device):
        tile = tile_of_many(t.size, K, 1 + t.glu, shared)
    else:
        tile = tile_of(M, t.size, K, x_bytes, w_bytes * (1 + t.glu), shared)
    _launch(t, y, tile, K)
    return y


def projection_norm(t: inputs.NormedInputs, n: norm_options.NormOptions) -> tuple[Tensor, Tensor]:
    """Partial sums [shares, M, N] of shares of K, and their sum with the residual and its norm."""
    (M, K), N = t.x.shape, t.weight.shape[0]
    tile, shares = tile_of_shares(K)
    columns = -(-K // (shares * tile.BK)) * tile.BK
    shares = -(-K // columns)
    partial = torch.empty(shares, M, N, dtype=torch.float32, device=t.x.device)
    _launch(t.product, partial, tile, columns)
    h = torch.empty(M, N, dtype=t.residual.dtype, device=t.x.device)
    y = torch.empty(M, N, dtype=t.x.dtype, device=t.x.device)
    pdl = backends.supports_pdl(t.x.device)
    launch_cache.cached(projection_sums_kernel)[(M,)](
        partial_ptr=partial,
        residual_ptr=t.residual,
        norm_weight_ptr=t.norm_weight,
        h_ptr=h,
        y_ptr=y,
        eps=n.eps,
        M=M,
        row_residual=t.residual.stride(0),
        N=N,
        S=shares,
        BS=_power(shares),
        BN=_power(N),
        **n.row_constants(),
        PDL=pdl,
        num_warps=8,
        **({"launch_pdl": True} if pdl else {}),
    )
    return h, y


def _launch(t: inputs.ProjectionInputs, y: Tensor, tile: ProjectionTile, columns: int) -> None:
    """columns: of a share of K; y: [M, N], or of several shares [shares, M, N]."""
    M, K = t.x.shape
    norm = t.norm if t.norm is not None and t.normalises else norm_options.NormOptions(0.0)
    missing = inputs.MAX_WEIGHTS - len(t.weights)
    weights = [*t.weights, *[None] * missing]
    biases = [*t.biases, *[None] * missing]
    sizes = [0 if w is None else w.shape[0] for w in weights]
    pdl = backends.supports_pdl(t.x.device)
    blocks = sum(-(-n // tile.BN) for n in (sizes[:1] if t.glu else sizes))
    tensors = {f"w{i}_ptr": w for i, w in enumerate(weights)}
    tensors |= {f"b{i}_ptr": b for i, b in enumerate(biases)}
    launch_cache.cached(projection_step_kernel)[blocks, -(-K // columns)](
        x_ptr=t.x,
        **tensors,
        norm_weight_ptr=t.norm_weight if t.normalises else None,
        residual_ptr=t.residual,
        y_ptr=y,
        eps=norm.eps,
        M=M,
        **{f"N{i}": n for i, n in enumerate(sizes)},
        row_x=t.x.stride(0),
        row_y=y.stride(-2),
        row_residual=0 if t.residual is None else t.residual.stride(0),
        K=K,
        ONE=M == 1,
        BM=tile.BM,
        BN=tile.BN,
        BK=tile.BK,
        NORM=t.normalises,
        **norm.row_constants(),
        GLU=t.glu,
        COLUMNS=columns,
        X_LEFT=tile.x_left,
        PDL=pdl,
        PREFETCH=pdl and M <= device.PREFETCH_ROWS and _in_words(t),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **({"launch_pdl": True} if pdl else {}),
    )
