"""Linear layers of a few rows: every weight is read once, and that is all the time there is.

    x' = x norm_weight / sqrt(mean x^2 + eps), or x
    y_i = x' W_i^T + b_i                 of up to five weights, side by side
    y = silu(y_0) y_1                    GLU
    y = y + residual

A program has BN rows of one weight. One row of x is multiplied without tensor cores; its norm is
taken along the way, the products divided by the root of its squares' mean at the end. Of several
rows y_i is rounded, as a linear layer's result is, so that bits are those of the layers apart.
Or a program has a share of K, and y is partial sums in float32, which sums.py adds up.
"""

import triton
import triton.language as tl

from slipstream.kernels.primitives.begin_ahead import prefetch, wait_for_earlier


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
        prefetch(weight_ptr + o_w, row)
        if GLU:
            prefetch(w1_ptr + o_w, row)
    wait_for_earlier(PDL)
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
