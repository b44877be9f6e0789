"""Hyper-connections in portable Triton; MATH.md has the formulas.

Before a layer the streams are read twice each way: forward for the products with M weights, by many
tokens of one stream a program, and for the collapse, by one token a program; backward for dpre, by
one token, and for dx and the weights' gradients, by some features of one stream or of all, whose
weights stay in registers. After a layer a program has one token. Factors beside bf16 are two
numbers of it. Sums over tokens are each over a fixed share, so that bits stay the same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime import backends, launch_cache


@triton.jit
def _half(b_x, o, SPLIT: tl.constexpr):
    """b_x of even o, what bf16 cuts off of it of odd o: products of both are right to 2^-16."""
    if SPLIT:
        # cut, not rounded, which takes fewer instructions: the rest has what is cut off
        b_high = (b_x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        b_x = tl.where(o % 2 == 0, b_high, b_x - b_high)
    return b_x


@triton.jit
def _scales(scale_ptr, o_m, N: tl.constexpr, M: tl.constexpr):
    o = tl.where(o_m < N, 0, tl.where(o_m < 2 * N, 1, 2))
    return tl.load(scale_ptr + o, mask=o_m < M, other=0.0).to(tl.float32)


@triton.jit
def _sigmoids(p_ptr, base_ptr, scale_ptr, o_m, m, N: tl.constexpr, M: tl.constexpr):
    """sigmoid(scale p + base) of weights o_m, of a token's p."""
    b_base = tl.load(base_ptr + o_m, mask=m, other=0.0).to(tl.float32)
    b_p = tl.load(p_ptr + o_m, mask=m, other=0.0)
    return tl.sigmoid(b_p * _scales(scale_ptr, o_m, N, M) + b_base)


@triton.jit
def _softmax(p_ptr, base_ptr, scale_ptr, N: tl.constexpr, NP: tl.constexpr):
    """Of a token's last N N weights, [NP, NP], with zeros beyond N."""
    o_i, o_j = tl.arange(0, NP)[:, None], tl.arange(0, NP)[None, :]
    o, m = 2 * N + o_i * N + o_j, (o_i < N) & (o_j < N)
    b_base = tl.load(base_ptr + o, mask=m, other=0.0).to(tl.float32)
    b_p = tl.load(p_ptr + o, mask=m, other=0.0)
    b_l = tl.where(o_j < N, b_p * tl.load(scale_ptr + 2).to(tl.float32) + b_base, float("-inf"))
    b_e = tl.exp(b_l - tl.max(b_l, 1)[:, None])
    return tl.where(m, b_e / tl.sum(b_e, 1)[:, None], 0.0)


@triton.jit
def _normalize(b_c, p_sums, m, eps, AXIS: tl.constexpr):
    b_s = tl.sum(b_c, AXIS) + eps
    tl.store(p_sums, b_s, mask=m)
    return b_c / tl.expand_dims(b_s, AXIS)


@triton.jit
def _undo(b_c, b_dc, p_sums, m, AXIS: tl.constexpr):
    """What was normalized to b_c, and its gradient."""
    # beyond N sums of 1: nothing is divided by zero
    b_s = tl.expand_dims(tl.load(p_sums, mask=m, other=1.0), AXIS)
    return b_c * b_s, (b_dc - tl.expand_dims(tl.sum(b_c * b_dc, AXIS), AXIS)) / b_s


@triton.jit
def mhc_split_kernel(w_ptr, half_ptr, L, HALVES: tl.constexpr, BL: tl.constexpr):
    """Grid (HALVES M, ceil(L / BL)). w [M, L] as half [HALVES M, L]: rows of _half."""
    i_m, o = tl.program_id(0), tl.program_id(1) * BL + tl.arange(0, BL)
    b_w = tl.load(w_ptr + (i_m // HALVES) * L + o, mask=o < L).to(tl.float32)
    b_w = _half(b_w, i_m, HALVES == 2)
    tl.store(half_ptr + i_m * L + o, b_w.to(half_ptr.dtype.element_ty), mask=o < L)


@triton.jit(do_not_specialize=["R"])
def mhc_scores_kernel(
    x_ptr, half_ptr, scores_ptr, R, N: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    BM: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (R / BT, N). x [R, N, D], half [M, N D], M rows of weights or of their halves, scores
    [N, R, M + 1]: what a stream adds to the products, and the sum of its squares."""
    o_t, i_n = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.program_id(1)
    o_m, m_t = tl.arange(0, BM), o_t < R
    p_x, p_w = x_ptr + (o_t * N + i_n)[None, :] * D, half_ptr + (o_m * N + i_n)[:, None] * D
    b_p, b_square = tl.zeros([BM, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    for i in tl.range(0, (D + BK - 1) // BK, num_stages=STAGES):
        o_d = i * BK + tl.arange(0, BK)
        m_d = o_d < D
        b_x = tl.load(p_x + o_d[:, None], mask=m_t[None, :] & m_d[:, None], other=0.0)
        b_w = tl.load(p_w + o_d[None, :], mask=(o_m < M)[:, None] & m_d[None, :], other=0.0)
        b_x = b_x.to(b_w.dtype)
        b_p = tl.dot(b_w, b_x, b_p, input_precision=PRECISION)
        # a product too: no register reads what copies of later turns may overwrite (triton#6691)
        b_square = tl.dot(tl.trans(b_x), b_x, b_square, input_precision=PRECISION)
    p_s = scores_ptr + (i_n * R.to(tl.int64) + o_t) * (M + 1)
    tl.store(p_s[None, :] + o_m[:, None], b_p, mask=m_t[None, :] & (o_m < M)[:, None])
    o_i, o_j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    tl.store(p_s + M, tl.sum(tl.where(o_i == o_j, b_square, 0.0), 0), mask=m_t)


@triton.jit(do_not_specialize=["R", "step", "iterations"])
def mhc_pre_fwd_kernel(
    x_ptr, scores_ptr, base_ptr, scale_ptr, y_ptr, post_ptr, comb_ptr, p_ptr, rstd_ptr, sums_ptr,
    R, step, eps, norm_eps, iterations, magnitude, post_eps,
    N: tl.constexpr, D: tl.constexpr, M: tl.constexpr, NP: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Grid (R). scores: mhc_scores_kernel's, y [R, D], post [R, N], comb [R, N, N], p [R, M],
    rstd [R], sums [2 iterations - 1, R, N] with R N for step, or [1, R, N] with 0."""
    i_t, o_m, o_n = tl.program_id(0).to(tl.int64), tl.arange(0, BM), tl.arange(0, NP)
    m_n, p_p = o_n < N, p_ptr + i_t * M
    b_p, b_square = tl.zeros([BM], tl.float32), 0.0
    for n in tl.static_range(N):
        p_s = scores_ptr + (n * R.to(tl.int64) + i_t) * (HALVES * M + 1)
        for half in tl.static_range(HALVES):
            b_p += tl.load(p_s + HALVES * o_m + half, mask=o_m < M, other=0.0)
        b_square += tl.load(p_s + HALVES * M)
    b_rstd = tl.rsqrt(b_square / (N * D) + norm_eps)
    tl.store(rstd_ptr + i_t, b_rstd)
    tl.store(p_p + o_m, b_p * b_rstd, mask=o_m < M)
    # from here on other threads read what these have written, in other shapes
    tl.debug_barrier()
    if M > N:
        b_s = _sigmoids(p_p, base_ptr, scale_ptr, N + o_n, m_n, N, M)
        tl.store(post_ptr + i_t * N + o_n, magnitude * b_s + post_eps, mask=m_n)
    if M > 2 * N:
        o_i, o_j = o_n[:, None], o_n[None, :]
        b_c, m_c = _softmax(p_p, base_ptr, scale_ptr, N, NP), (o_i < N) & (o_j < N)
        # beyond N ones on the diagonal, so that no sum is zero
        b_c = tl.where(m_c, b_c + eps, tl.where(o_i == o_j, 1.0, 0.0))
        p_s = sums_ptr + i_t * N + o_n
        b_c = _normalize(b_c, p_s, m_n, eps, 0)
        for _ in range(1, iterations):
            b_c = _normalize(b_c, p_s + step, m_n, eps, 1)
            p_s += 2 * step.to(tl.int64)
            b_c = _normalize(b_c, p_s, m_n, eps, 0)
        tl.store(comb_ptr + (i_t * N + o_i) * N + o_j, b_c, mask=m_c)
    b_pre = _sigmoids(p_p, base_ptr, scale_ptr, o_n, m_n, N, M)[:, None] + eps
    # the streams of some features at once, each thread with the same features of all
    for d in range(0, D, BD):
        o_d = d + tl.arange(0, BD)
        m_d = o_d < D
        p_x = x_ptr + (i_t * N + o_n)[:, None] * D + o_d[None, :]
        b_x = tl.load(p_x, mask=m_n[:, None] & m_d[None, :], other=0.0).to(tl.float32)
        b_y = tl.sum(b_pre * b_x, 0)
        tl.store(y_ptr + i_t * D + o_d, b_y.to(y_ptr.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["step", "iterations"])
def mhc_pre_bwd_kernel(
    x_ptr, base_ptr, scale_ptr, comb_ptr, p_ptr, rstd_ptr, sums_ptr, dy_ptr, dpost_ptr, dcomb_ptr,
    dl_ptr, half_ptr, of_x_ptr, step, eps, iterations, magnitude,
    N: tl.constexpr, D: tl.constexpr, M: tl.constexpr, NP: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Grid (R). dl [R, M] are the gradients of scale p + base, zeros at first; half [R, HALVES BM]
    is rstd dp, of_x [R, N + 1] what dx has of dy in each stream, and of -x: the norm divides by a
    number that all of a token's features make."""
    i_t, o_m, o_n = tl.program_id(0).to(tl.int64), tl.arange(0, BM), tl.arange(0, NP)
    m_n, o, p_p, p_dl = o_n < N, i_t * N + o_n, p_ptr + i_t * M, dl_ptr + i_t * M
    if dpost_ptr is not None:
        b_s = _sigmoids(p_p, base_ptr, scale_ptr, N + o_n, m_n, N, M)
        b_d = tl.load(dpost_ptr + o, mask=m_n, other=0.0) * magnitude
        tl.store(p_dl + N + o_n, b_d * b_s * (1 - b_s), mask=m_n)
    if dcomb_ptr is not None:
        o_c, m_c = o[:, None] * N + o_n[None, :], m_n[:, None] & m_n[None, :]
        b_c = tl.load(comb_ptr + o_c, mask=m_c, other=0.0)
        b_dc = tl.load(dcomb_ptr + o_c, mask=m_c, other=0.0)
        # no step waits for its sums: those of further ones are on their way
        for i in tl.range(0, iterations - 1, num_stages=4):
            p_s = sums_ptr + o + 2 * (iterations - 1 - i) * step.to(tl.int64)
            b_c, b_dc = _undo(b_c, b_dc, p_s, m_n, 0)
            b_c, b_dc = _undo(b_c, b_dc, p_s - step, m_n, 1)
        b_c, b_dc = _undo(b_c, b_dc, sums_ptr + o, m_n, 0)
        b_c = _softmax(p_p, base_ptr, scale_ptr, N, NP)
        b_dc = b_c * (b_dc - tl.sum(b_c * b_dc, 1)[:, None])
        tl.store(p_dl + 2 * N + o_n[:, None] * N + o_n[None, :], b_dc, mask=m_c)
    # summed once, after the loop: a sum over threads in each turn would hold it up
    b_dpre = tl.zeros([NP, BD], tl.float32)
    for d in range(0, D, BD):
        o_d = d + tl.arange(0, BD)
        m_d = o_d < D
        b_x = tl.load(x_ptr + o[:, None] * D + o_d, mask=m_n[:, None] & m_d[None, :], other=0.0)
        b_dy = tl.load(dy_ptr + i_t * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_dpre += b_x.to(tl.float32) * b_dy[None, :]
    b_s = _sigmoids(p_p, base_ptr, scale_ptr, o_n, m_n, N, M)
    tl.store(p_dl + o_n, tl.sum(b_dpre, 1) * b_s * (1 - b_s), mask=m_n)
    p_x = of_x_ptr + i_t * (N + 1)
    tl.store(p_x + o_n, b_s + eps, mask=m_n)
    # dl, which other threads have written
    tl.debug_barrier()
    o_h = tl.arange(0, HALVES * BM)
    o_m = o_h // HALVES
    b_dp = tl.load(p_dl + o_m, mask=o_m < M, other=0.0) * _scales(scale_ptr, o_m, N, M)
    b_dp *= tl.load(rstd_ptr + i_t)
    b_half = _half(b_dp, o_h, HALVES == 2)
    tl.store(half_ptr + i_t * HALVES * BM + o_h, b_half.to(half_ptr.dtype.element_ty))
    b_norm = tl.sum(b_dp * tl.load(p_p + o_m, mask=o_m < M, other=0.0), 0)
    tl.store(p_x + N, b_norm * tl.load(rstd_ptr + i_t) / (HALVES * N * D))


@triton.jit(do_not_specialize=["R"])
def mhc_streams_bwd_kernel(
    x_ptr, w_ptr, half_ptr, of_x_ptr, dy_ptr, dx_ptr, dw_ptr,
    R, N: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, HALVES: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, G: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (N / G ceil(D / BK), P): of G streams, which read dy and half once. dx [R, N, D]; dw
    [P HALVES, M / HALVES, N D]: the sums of rstd dp x of every P-th tile of tokens."""
    tiles: tl.constexpr = (D + BK - 1) // BK
    i_n, i_p, o_m = tl.program_id(0) // tiles * G, tl.program_id(1), tl.arange(0, BM)
    o_d = tl.program_id(0) % tiles * BK + tl.arange(0, BK)
    m_d, w, dw = o_d < D, (), ()
    m_w = (o_m < M)[:, None] & m_d[None, :]
    for n in tl.static_range(G):
        o_w = (o_m // HALVES * N + i_n + n)[:, None] * D + o_d[None, :]
        # of both halves of a gradient the same weight, rounded as dx is
        w += (tl.load(w_ptr + o_w, mask=m_w, other=0.0).to(half_ptr.dtype.element_ty),)
        dw += (tl.zeros([BM, BK], tl.float32),)
    for i in tl.range(i_p, tl.cdiv(R, BT), tl.num_programs(1), num_stages=STAGES):
        o_t = i * BT + tl.arange(0, BT).to(tl.int64)
        m_t, sums = o_t < R, ()
        m_x = m_t[:, None] & m_d[None, :]
        # once for all streams: they take more of the L2 cache's bandwidth than x does otherwise
        b_dy = tl.load(dy_ptr + o_t[:, None] * D + o_d[None, :], mask=m_x, other=0.0)
        b_half = tl.load(half_ptr + o_t[:, None] * BM + o_m[None, :], mask=m_t[:, None], other=0.0)
        b_of_x = tl.load(of_x_ptr + o_t * (N + 1) + N, mask=m_t, other=0.0)
        for n in tl.static_range(G):
            o_x = (o_t * N + i_n + n)[:, None] * D + o_d[None, :]
            b_x = tl.load(x_ptr + o_x, mask=m_x, other=0.0)
            b_of_dy = tl.load(of_x_ptr + o_t * (N + 1) + i_n + n, mask=m_t, other=0.0)
            # the gradients of these weights need these features alone, of all tokens
            b_new, b_t = b_x.to(b_half.dtype), tl.trans(b_half)
            sums += (tl.dot(b_t, b_new, dw[n], input_precision=PRECISION),)
            b_dx = b_of_dy[:, None] * b_dy.to(tl.float32) - b_of_x[:, None] * b_x.to(tl.float32)
            b_dx = tl.dot(b_half, w[n], b_dx, input_precision=PRECISION)
            tl.store(dx_ptr + o_x, b_dx.to(dx_ptr.dtype.element_ty), mask=m_x)
        dw = sums
    i_w = (i_p.to(tl.int64) * HALVES + o_m % HALVES) * (M // HALVES) + o_m // HALVES
    for n in tl.static_range(G):
        tl.store(dw_ptr + (i_w * N + i_n + n)[:, None] * D + o_d[None, :], dw[n], mask=m_w)


@triton.jit(do_not_specialize=["R"])
def mhc_sums_bwd_kernel(
    dl_ptr, p_ptr, of_l_ptr, R, N: tl.constexpr, M: tl.constexpr, BM: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Grid (P). of_l [P, M + 3], of every P-th tile of tokens: of dl [R, M], and of dl p over the
    weights of pre, post and comb."""
    o_m, i_p = tl.arange(0, BM), tl.program_id(0)
    b_dl, b_dlp = tl.zeros([BT, BM], tl.float32), tl.zeros([BT, BM], tl.float32)
    for i in range(i_p, tl.cdiv(R, BT), tl.num_programs(0)):
        o_t = i * BT + tl.arange(0, BT).to(tl.int64)
        o, m = o_t[:, None] * M + o_m[None, :], (o_t < R)[:, None] & (o_m < M)[None, :]
        b_g = tl.load(dl_ptr + o, mask=m, other=0.0)
        b_dl += b_g
        b_dlp += b_g * tl.load(p_ptr + o, mask=m, other=0.0)
    p_s, b_dlp = of_l_ptr + i_p * (M + 3), tl.sum(b_dlp, 0)
    tl.store(p_s + o_m, tl.sum(b_dl, 0), mask=o_m < M)
    part = tl.minimum(o_m // N, 2)
    for i in tl.static_range(3):
        tl.store(p_s + M + i, tl.sum(tl.where(part == i, b_dlp, 0.0), 0))


@triton.jit
def mhc_post_fwd_kernel(
    x_ptr, y_ptr, post_ptr, comb_ptr, out_ptr,
    N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (R, D / BD). x, out [R, N, D]; y [R, D]; post [R, N]; comb [R, N, N], None: identity."""
    i_t, o_d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_y = tl.load(y_ptr + i_t * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    # all of a token's streams at once, so that each is read once
    streams = ()
    for n in tl.static_range(N):
        p_x = x_ptr + (i_t * N + n) * D + o_d
        streams = streams + (tl.load(p_x, mask=m_d, other=0.0).to(tl.float32),)
    for j in tl.static_range(N):
        b_o = tl.load(post_ptr + i_t * N + j).to(tl.float32) * b_y
        if comb_ptr is None:
            b_o += streams[j]
        else:
            # down a column: streams' = comb^T streams
            for n in tl.static_range(N):
                b_o += tl.load(comb_ptr + (i_t * N + n) * N + j).to(tl.float32) * streams[n]
        tl.store(out_ptr + (i_t * N + j) * D + o_d, b_o.to(out_ptr.dtype.element_ty), mask=m_d)


@triton.jit
def mhc_post_bwd_kernel(
    do_ptr, x_ptr, y_ptr, post_ptr, comb_ptr, dx_ptr, dy_ptr, dpost_ptr, dcomb_ptr,
    N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (R). dpost [R, N] and dcomb [R, N, N] float32; without comb dx is not written."""
    o = tl.program_id(0).to(tl.int64) * N
    # eight features a thread, whose sum takes one register and no other thread
    o_8 = tl.arange(0, BD // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    zero = tl.zeros([BD // 8], tl.float32)
    post, dpost, comb, dcomb = (), (), (), ()
    for j in tl.static_range(N):
        post += (tl.load(post_ptr + o + j).to(tl.float32),)
        dpost += (zero,)
    if comb_ptr is not None:
        for i in tl.static_range(N * N):
            comb += (tl.load(comb_ptr + o * N + i).to(tl.float32),)
            dcomb += (zero,)
    for d in range(0, D, BD):
        o_d = d + o_8
        m_d = o_d < D
        b_y = tl.load(y_ptr + o // N * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_dy = tl.zeros_like(b_y)
        outs, sums = (), ()
        for j in tl.static_range(N):
            b_do = tl.load(do_ptr + (o + j) * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            outs += (b_do,)
            sums += (dpost[j] + tl.sum(b_y * b_do, 1),)
            b_dy += post[j] * b_do
        dpost = sums
        tl.store(dy_ptr + o // N * D + o_d, b_dy.to(dy_ptr.dtype.element_ty), mask=m_d)
        if comb_ptr is not None:
            sums = ()
            for n in tl.static_range(N):
                o_x, b_dx = (o + n) * D + o_d, tl.zeros_like(b_y)
                b_x = tl.load(x_ptr + o_x, mask=m_d, other=0.0).to(tl.float32)
                for j in tl.static_range(N):
                    sums += (dcomb[n * N + j] + tl.sum(b_x * outs[j], 1),)
                    b_dx += comb[n * N + j] * outs[j]
                tl.store(dx_ptr + o_x, b_dx.to(dx_ptr.dtype.element_ty), mask=m_d)
            dcomb = sums
    # sums over threads come once, at the end
    for j in tl.static_range(N):
        tl.store(dpost_ptr + o + j, tl.sum(dpost[j], 0))
    if comb_ptr is not None:
        for i in tl.static_range(N * N):
            tl.store(dcomb_ptr + o * N + i, tl.sum(dcomb[i], 0))


def _halves(x: Tensor) -> tuple[int, torch.dtype]:
    """Factors beside x: how many a number is, and of which dtype."""
    split = x.dtype == torch.bfloat16
    return (2, torch.bfloat16) if split else (1, torch.float32)


def _tile(x: Tensor, M: int, kernel: str) -> dict[str, int]:
    """Of the kernels with products. M: of weights or of halves."""
    tiles = {"scores": (64, 128, 3, 4), "streams": (64, 64, 3, 4)}
    (R, N, D), (BT, BK, stages, warps) = x.shape, tiles[kernel]
    BM = max(triton.next_power_of_2(M), 16)
    # few tokens are divided among as many programs as there can be
    if kernel == "scores" and 16 * backends.sm_count(x.get_device()) >= R:
        BT = 16
    if BM > 64:
        BK, warps = BK // 2, 2 * warps
    if x.dtype != torch.bfloat16:  # float32 in products, three for one
        BT, BK = (BT, BK // 2) if kernel == "scores" else (BT // 2, BK)
    BK = min(BK, max(triton.next_power_of_2(D), 16))
    if (BT if kernel == "scores" else BK) < 64:
        warps = 2  # wgmma, which takes four, is wrong for so few columns under ptxas 12.8
    tile = {"N": N, "D": D, "M": M, "BM": BM, "BT": BT, "BK": BK, "STAGES": stages}
    return tile | {"num_warps": warps}


def _row(x: Tensor, M: int) -> dict[str, int]:
    """Of the kernels with a token a program before a layer."""
    (_, N, D), BM = x.shape, max(triton.next_power_of_2(M), 16)
    NP, halves = triton.next_power_of_2(N), _halves(x)[0]
    BD = min(triton.next_power_of_2(D), max(1024 // NP, 128))
    row = {"N": N, "D": D, "M": M, "NP": NP, "BM": BM, "BD": BD, "HALVES": halves}
    return row | {"num_warps": 1}


def pre(
    x: Tensor, weight: Tensor, base: Tensor, scale: Tensor, eps: float, norm_eps: float,
    iterations: int, magnitude: float, post_eps: float, keep: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """y, post, comb, p, rstd and sums, as the kernel has them."""
    (R, N, D), M = x.shape, weight.shape[0]
    rounds = 2 * iterations - 1 if keep else 1
    sizes = (R, N)[: 2 * (M > N)], (R, N, N)[: 3 * (M > 2 * N)], (R, M), (R,), (rounds, R, N)
    post, comb, p, rstd, sums = (
        x.new_empty(size, dtype=torch.float32) if size else None for size in sizes
    )
    halves, dtype = _halves(x)
    half = x.new_empty(halves * M, N * D, dtype=dtype)
    y, scores = x.new_empty(R, D), x.new_empty(N, R, halves * M + 1, dtype=torch.float32)
    tile = _tile(x, halves * M, "scores")
    if R > 0:
        launch_cache.cached(mhc_split_kernel)[(halves * M, triton.cdiv(N * D, 1024))](
            w_ptr=weight, half_ptr=half, L=N * D, HALVES=halves, BL=1024
        )
        launch_cache.cached(mhc_scores_kernel)[(triton.cdiv(R, tile["BT"]), N)](
            x_ptr=x, half_ptr=half, scores_ptr=scores, R=R, **tile,
            PRECISION=backends.fp32_dot_precision(),
        )  # fmt: skip
        launch_cache.cached(mhc_pre_fwd_kernel)[(R,)](
            x_ptr=x, scores_ptr=scores, base_ptr=base, scale_ptr=scale, y_ptr=y, post_ptr=post,
            comb_ptr=comb, p_ptr=p, rstd_ptr=rstd, sums_ptr=sums, R=R, step=R * N * keep,
            eps=eps, norm_eps=norm_eps, iterations=iterations, magnitude=magnitude,
            post_eps=post_eps, **_row(x, M),
        )  # fmt: skip
    return y, post, comb, p, rstd, None if comb is None else sums


def pre_backward(
    x: Tensor, weight: Tensor, base: Tensor, scale: Tensor, comb: Tensor, p: Tensor, rstd: Tensor,
    sums: Tensor, dy: Tensor, dpost: Tensor | None, dcomb: Tensor | None, eps: float,
    norm_eps: float, iterations: int, magnitude: float, post_eps: float,
) -> list[Tensor]:  # fmt: skip
    """dx, and the gradients of weight, base and scale."""
    (R, N, D), M = x.shape, weight.shape[0]
    dy = dy.contiguous()
    dpost, dcomb = (None if g is None else g.contiguous() for g in (dpost, dcomb))
    (halves, dtype), row = _halves(x), _row(x, M)
    tile = _tile(x, halves * row["BM"], "streams") | {"M": halves * M}
    dx, dl, half = torch.empty_like(x), torch.zeros_like(p), x.new_empty(R, tile["BM"], dtype=dtype)
    of_x = x.new_empty(R, N + 1, dtype=torch.float32)
    # in shares, so that bits stay the same
    of_l = p.new_empty(min(triton.cdiv(R, 32), backends.sm_count(x.get_device())), M + 3)
    # all streams in one program, of which a multiprocessor with much shared memory has one
    wide = halves == 2 and tile["BM"] * N <= 256 <= 4 * tile["BK"]
    G = N if wide and backends.shared_memory_bytes(x.get_device()) >= 3 << 16 else 1
    columns, each = N // G * triton.cdiv(D, tile["BK"]), 4 if G == 1 else 1
    tile["num_warps"] = tile["num_warps"] if G == 1 else 8
    shares = max(min(each * backends.sm_count(x.get_device()) // columns, R // 512), 1)
    dw = (x.new_empty if R else x.new_zeros)(shares * halves, M, N * D, dtype=torch.float32)
    if R > 0:
        launch_cache.cached(mhc_pre_bwd_kernel)[(R,)](
            x_ptr=x, base_ptr=base, scale_ptr=scale, comb_ptr=comb, p_ptr=p, rstd_ptr=rstd,
            sums_ptr=sums, dy_ptr=dy, dpost_ptr=dpost, dcomb_ptr=dcomb, dl_ptr=dl,
            half_ptr=half, of_x_ptr=of_x, step=R * N, eps=eps, iterations=iterations,
            magnitude=magnitude, **row,
        )  # fmt: skip
        launch_cache.cached(mhc_streams_bwd_kernel)[(columns, shares)](
            x_ptr=x, w_ptr=weight, half_ptr=half, of_x_ptr=of_x, dy_ptr=dy, dx_ptr=dx,
            dw_ptr=dw, R=R, G=G, **tile, HALVES=halves, PRECISION=backends.fp32_dot_precision(),
        )  # fmt: skip
        launch_cache.cached(mhc_sums_bwd_kernel)[(len(of_l),)](
            dl_ptr=dl, p_ptr=p, of_l_ptr=of_l, R=R, N=N, M=M, BM=row["BM"], BT=32, num_warps=4
        )
    of_l = of_l.sum(0)
    grads = dw.sum(0), of_l[:M], of_l[M : M + len(scale)]
    return [dx, *(g.to(t.dtype) for g, t in zip(grads, (weight, base, scale)))]


def post(x: Tensor, y: Tensor, post: Tensor, comb: Tensor | None) -> Tensor:
    (R, N, D), out = x.shape, torch.empty_like(x)
    BD = min(triton.next_power_of_2(D), 1024)
    if R > 0:
        launch_cache.cached(mhc_post_fwd_kernel)[(R, triton.cdiv(D, BD))](
            x_ptr=x, y_ptr=y, post_ptr=post, comb_ptr=comb, out_ptr=out, N=N, D=D, BD=BD,
            num_warps=4,
        )  # fmt: skip
    return out


def post_backward(
    do: Tensor, x: Tensor, y: Tensor, post: Tensor, comb: Tensor | None
) -> list[Tensor]:
    """dx, dy, dpost, and dcomb if there is comb."""
    (R, N, D), do = x.shape, do.contiguous()
    dx, dy = torch.empty_like(x) if comb is not None else do.clone(), torch.empty_like(y)
    weights = [w for w in (post, comb) if w is not None]
    grads = [torch.empty_like(w, dtype=torch.float32) for w in weights]
    if R > 0:
        launch_cache.cached(mhc_post_bwd_kernel)[(R,)](
            do_ptr=do, x_ptr=x, y_ptr=y, post_ptr=post, comb_ptr=comb, dx_ptr=dx, dy_ptr=dy,
            dpost_ptr=grads[0], dcomb_ptr=grads[-1], N=N, D=D, BD=256, num_warps=1,
        )  # fmt: skip
    return [dx, dy, *(g.to(w.dtype) for g, w in zip(grads, weights))]
