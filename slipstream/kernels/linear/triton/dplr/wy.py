"""Transitions with a decay for every channel, or with free a and b: what needs no state.

A read of the state under a gives x_i, which is written under b; dplr writes v under k besides. The
delta rule is a = k after the decay, b = k, and its own right side. In a chunk, S the state before
it and ab, ak, qb, qk the decayed scores of its tokens, strict for a,

    delta  (I + beta ab) x = beta v - beta (k exp(G)) S             R = (I + beta ab)^-1
    dplr   (I - ab) x      = ak v + (a exp(G_prev)) S               R = (I - ab)^-1

so that x = U + W S with

    delta  U = R beta v        W = -R beta (k exp(G))
    dplr   U = R ak v          W = R (a exp(G_prev))

and the scan's step has neither gates nor scores to compute. One program does one chunk of a value
head and writes W, U, scale (q exp(G)), b exp(G_C - G), k exp(G_C - G), exp(G_C), scale qb and
scale qk in the order in which the scan reads them: chunk by chunk, K filled up with zeros. Decays
are those of intra_anchored.py.

The kernel is compiled twice, weak and STRONG. The weak one marks chunks that decay too far for
these decays, and ends. The STRONG one takes them, at any gate: rows of scores whose tokens have not
decayed too far have the bits that they have in weak chunks, the others are those of intra_safe.py.

In 16 bits R is not rounded before the products, nor U: without decay, rounding all of R, W, U and x
puts outputs off by 6e-3, where this leaves 4.9e-3.
"""

from collections import namedtuple

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.delta.solve_tril import inverse, locate_chunk
from slipstream.kernels.linear.triton.dplr import intra_anchored, intra_safe
from slipstream.kernels.linear.triton.scalar_decay.chunk import load_block

# constants of a launch, for device functions
Constants = namedtuple(
    "Constants",
    "K V WIDE BK BV STEPS DELTA HAS_GATE CHANNEL FP32 LIMIT SHIFT APART PRECISION INNER",
)
Operands = namedtuple("Operands", "a b k")


@triton.jit
def _unrounded(b_l, b_r, PRECISION: tl.constexpr):
    """b_l @ b_r, of which b_l is float32, in 16 bits the sum of two."""
    b_high = b_l.to(b_r.dtype)
    b = tl.dot(b_high, b_r, input_precision=PRECISION)
    if b_r.dtype != tl.float32:
        b = tl.dot((b_l - b_high.to(tl.float32)).to(b_r.dtype), b_r, b)
    return b


@triton.jit
def solve_chunk(b_ab, b_ak, p_beta, HV, p_v, p_w, p_u, p_ak, p_r, keep, o_c, m_c, c):
    """R from the scores [C, C], and U and W, which takes the place of a with its decay."""
    C: tl.constexpr = o_c.shape[0]
    LEVELS: tl.constexpr = c.STEPS - 4
    act = p_w.dtype.element_ty
    o_a = o_c[:, None] * C + o_c[None, :]
    if c.DELTA:
        b_beta = tl.load(p_beta + o_c * HV, mask=m_c, other=0.0).to(tl.float32)
        b_r = inverse(b_ab * b_beta[:, None], C, LEVELS, c.INNER)
    else:
        b_r = inverse(-b_ab, C, LEVELS, c.INNER)
    if keep != 0:
        tl.store(p_r + o_a, b_r.to(act))
        if not c.DELTA:
            tl.store(p_ak + o_a, b_ak.to(act))
    if c.DELTA:
        b_r *= b_beta[None, :]
        b_right = b_r
    else:
        b_right = _unrounded(b_r, b_ak.to(act), c.PRECISION)
    tl.debug_barrier()  # other threads wrote what this one reads
    for n in range(c.WIDE // c.BK):
        p_a = p_w + o_c[:, None] * c.WIDE + n * c.BK + tl.arange(0, c.BK)[None, :]
        b_w = _unrounded(b_r, tl.load(p_a), c.PRECISION)
        if c.DELTA:
            b_w = -b_w
        tl.debug_barrier()
        tl.store(p_a, b_w.to(act))
    for n in range(tl.cdiv(c.V, c.BV)):
        o_v = n * c.BV + tl.arange(0, c.BV)
        b_v = load_block(p_v, HV * c.V, o_c, m_c, o_v, c.V, c.V % c.BV != 0)
        b_u = _unrounded(b_right, b_v, c.PRECISION)  # [C, BV]
        p_n = p_u + o_v[None, :] * C + o_c[:, None]
        tl.store(p_n, b_u, mask=(o_v < c.V)[None, :])


@triton.jit
def _add_scores_of_a(b_ab, b_ak, ops, i_k, w_ptr, i_w, g_ptr, i_g, o_c, m_c, HV, H, c):
    """ab and ak [C, C] of free a and b with those of a weak chunk, and a exp(G_prev) to w."""
    act = w_ptr.dtype.element_ty
    i = o_c[:, None]
    for n in range(c.WIDE // c.BK):
        o_k = n * c.BK + tl.arange(0, c.BK)
        o_q = i_k + i * (H * c.K) + o_k[None, :]
        m_k = m_c[:, None]
        if c.K != c.WIDE:
            m_k = m_k & (o_k < c.K)[None, :]
        b_a = tl.load(ops.a + o_q, mask=m_k, other=0.0)
        b_b = tl.load(ops.b + o_q, mask=m_k, other=0.0)
        b_k = tl.load(ops.k + o_q, mask=m_k, other=0.0)
        b_first = b_a
        if c.HAS_GATE:
            b_e, b_before, b_middle, _, _ = intra_anchored.load_from_start(
                g_ptr, i_g, HV * c.K**c.CHANNEL, o_c, m_k, o_k, c.CHANNEL, True, c.LIMIT, c.APART,
                c.FP32, c.PRECISION,
            )  # fmt: skip
            b_wide = b_a * intra_anchored.exp2_by_parts(b_before, c.APART)
            b_a = b_wide.to(act)
            b_first = (b_wide * intra_anchored.exp2_of_start(b_middle, o_c, c.APART)).to(act)
            b_write = intra_anchored.anchored_writes(b_e, c.LIMIT, c.APART)
            b_b = (b_b * b_write).to(act)
            b_k = (b_k * b_write).to(act)
        tl.store(w_ptr + i_w + i * c.WIDE + o_k[None, :], b_first)
        b_ab = tl.dot(b_a, tl.trans(b_b), b_ab, input_precision=c.PRECISION)
        b_ak = tl.dot(b_a, tl.trans(b_k), b_ak, input_precision=c.PRECISION)
    return b_ab, b_ak


@triton.jit(do_not_specialize=["scale", "keep", "T", "N", "HV", "H"])
def dplr_wy_kernel(
    q_ptr, k_ptr,  # [tokens, H, K]
    a_ptr, b_ptr,  # none for delta
    v_ptr,  # [tokens, HV, V]
    g_ptr,  # [tokens, HV, K] or [tokens, HV]
    beta_ptr,  # [tokens, HV], delta
    q_out_ptr,  # [chunks, HV, C, WIDE]: scale q exp(G)
    w_out_ptr,  # W
    b_out_ptr, k_out_ptr,  # b exp(G_C - G), k exp(G_C - G), dplr
    u_out_ptr,  # [chunks, HV, V, C]: U, float32
    total_ptr,  # [chunks, HV, WIDE]: exp(G_C)
    qb_ptr, qk_ptr,  # [chunks, HV, C, C], scaled, qk for dplr
    ak_ptr, r_ptr,  # if keep, ak for dplr
    strong_ptr,  # [chunks, HV]: 1 if a half decays by more than LIMIT, 2 if strong, -1 if no chunk
    ones_ptr,  # gate_ones.py's, if STRONG
    cu_ptr,  # [N + 1]
    scale, keep, T, N, HV, H,
    K: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, STEPS: tl.constexpr, DELTA: tl.constexpr, HAS_GATE: tl.constexpr,
    CHANNEL: tl.constexpr, PACKED: tl.constexpr, FP32: tl.constexpr, LIMIT: tl.constexpr,
    SHIFT: tl.constexpr, APART: tl.constexpr, PRECISION: tl.constexpr, INNER: tl.constexpr,
    STRONG: tl.constexpr,
):  # fmt: skip
    """grid (chunks * HV,). keep, which backward wants, is no constant: one compilation for both."""
    c: tl.constexpr = Constants(
        K, V, WIDE, BK, BV, STEPS, DELTA, HAS_GATE, CHANNEL, FP32, LIMIT, SHIFT, APART, PRECISION,
        INNER,
    )  # fmt: skip
    act = q_ptr.dtype.element_ty
    GK: tl.constexpr = K**CHANNEL
    FARTHEST: tl.constexpr = 2 * LIMIT if APART > 0 else LIMIT
    pid = tl.program_id(0)
    if STRONG:
        strong = tl.load(strong_ptr + pid)
        if strong < 2:  # most programs end here
            return
    i_h = pid % HV
    begin, length, i_c = locate_chunk(cu_ptr, pid // HV, T, N, C, PACKED)
    if PACKED and i_c * C >= length:
        if HAS_GATE:
            tl.store(strong_ptr + pid, -1)
        return
    o_c = tl.arange(0, C)
    m_c = o_c < length - i_c * C
    i, j = o_c[:, None], o_c[None, :]
    row = begin + i_c * C
    i_k, i_g = (row * H + i_h // (HV // H)) * K, (row * HV + i_h) * GK
    i_chunk_head = pid.to(tl.int64)
    i_a, i_w = i_chunk_head * (C * C), i_chunk_head * (C * WIDE)
    o_a = i * C + j
    write_ptr = k_ptr if DELTA else b_ptr
    b_qb, b_qk = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    b_ab, b_ak = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    # the largest decay of a half in any channel: whether the chunk is strong
    strongest, weak = tl.full((), 0.0, tl.float32), tl.full((), True, tl.int1)
    b_lowest = tl.zeros((C,), tl.float32)
    for n in range(WIDE // BK):
        o_k = n * BK + tl.arange(0, BK)
        o_w = i_w + i * WIDE + o_k[None, :]
        o_q = i_k + i * (H * K) + o_k[None, :]
        m_k = m_c[:, None]
        if K != WIDE:
            m_k = m_k & (o_k < K)[None, :]
        b_q = tl.load(q_ptr + o_q, mask=m_k, other=0.0)
        b_b = tl.load(write_ptr + o_q, mask=m_k, other=0.0)
        if HAS_GATE:
            b_e, _, b_middle, b_early, b_late = intra_anchored.load_from_start(
                g_ptr, i_g, HV * GK, o_c, m_k, o_k, CHANNEL, False, LIMIT, APART, FP32, PRECISION
            )
            if STRONG:
                b_low = intra_anchored.lowest_read(b_e, b_middle, b_early, o_c, LIMIT, APART)
                b_lowest = tl.minimum(b_lowest, b_low)
            else:
                b_half = intra_anchored.strongest_half(b_early, b_late, LIMIT, APART)
                strongest = tl.maximum(strongest, tl.max(b_half, 0))
                weak = strongest <= FARTHEST
        if weak:
            if HAS_GATE:
                tl.store(total_ptr + i_chunk_head * WIDE + o_k, tl.exp2(b_early + b_late))
                b_read = intra_anchored.exp2_by_parts(b_e, APART)
                b_start = intra_anchored.exp2_of_start(b_middle, o_c, APART)
                # float32 until it is stored, so that q~ and the operand are rounded once each
                b_wide = b_q * b_read
                b_q = b_wide.to(act)
                tl.store(q_out_ptr + o_w, (b_wide * (b_start * scale)).to(act))
                if DELTA:
                    b_wide = b_b * b_read
                    b_a = b_wide.to(act)
                    tl.store(w_out_ptr + o_w, (b_wide * b_start).to(act))
                b_write = intra_anchored.anchored_writes(b_e, LIMIT, APART)
                b_end = intra_anchored.until_end(b_early + b_late - b_middle, o_c, APART)
                b_wide = b_b * b_write
                b_b = b_wide.to(act)
                if not STRONG:
                    tl.store(b_out_ptr + o_w, (b_wide * b_end).to(act))
            else:
                tl.store(q_out_ptr + o_w, (b_q * scale).to(act))
                tl.store(b_out_ptr + o_w, b_b)
            b_qb = tl.dot(b_q, tl.trans(b_b), b_qb, input_precision=PRECISION)
            if DELTA:
                b_ab = tl.dot(b_a, tl.trans(b_b), b_ab, input_precision=PRECISION)
            else:
                b_k = tl.load(k_ptr + o_q, mask=m_k, other=0.0)
                if HAS_GATE:
                    b_wide = b_k * b_write
                    b_k = b_wide.to(act)
                    if not STRONG:
                        tl.store(k_out_ptr + o_w, (b_wide * b_end).to(act))
                else:
                    tl.store(k_out_ptr + o_w, b_k)
                b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision=PRECISION)
    if HAS_GATE and not STRONG:
        strong = (strongest > FARTHEST).to(tl.int32)
        tl.store(strong_ptr + i_chunk_head, strong + (strongest > LIMIT).to(tl.int32))
        if strong == 1:
            return
    if HAS_GATE:
        b_qb = intra_anchored.together(b_qb, o_c, APART)
        b_qk = intra_anchored.together(b_qk, o_c, APART)
        b_ab = intra_anchored.together(b_ab, o_c, APART)
    if STRONG:
        # rows whose decay from the chunk's start is too far
        rows = intra_anchored.is_read_anchored(b_lowest, LIMIT)[:, None] == 0
        p_g = g_ptr + i_g + i * (HV * GK)
        p_k, p_b = k_ptr + i_k + i * (H * K), write_ptr + i_k + i * (H * K)
        p_b_end = b_out_ptr + i_w + i * WIDE
        p_k_end = p_b_end if DELTA else k_out_ptr + i_w + i * WIDE
        b_qb, b_2 = intra_safe.add_decayed(
            (b_qb, b_ab if DELTA else b_qk), q_ptr + i_k + i * (H * K), p_b, p_k, p_b_end, p_k_end,
            p_g, ones_ptr, rows, o_c, m_c, False, c,
        )  # fmt: skip
        b_ab = b_2 if DELTA else b_ab
        b_qk = b_qk if DELTA else b_2
    tl.store(qb_ptr + i_a + o_a, tl.where(i >= j, b_qb * scale, 0.0).to(act))
    if not DELTA:
        tl.store(qk_ptr + i_a + o_a, tl.where(i >= j, b_qk * scale, 0.0).to(act))
        b_ab, b_ak = _add_scores_of_a(
            b_ab, b_ak, Operands(a_ptr, b_ptr, k_ptr), i_k, w_out_ptr, i_w, g_ptr, i_g, o_c, m_c,
            HV, H, c,
        )  # fmt: skip
        if HAS_GATE:
            b_ab = intra_anchored.together(b_ab, o_c, APART)
            b_ak = intra_anchored.together(b_ak, o_c, APART)
        if STRONG:
            b_ab, b_ak = intra_safe.add_decayed(
                (b_ab, b_ak), a_ptr + i_k + i * (H * K), p_b, p_k, None, None, p_g, ones_ptr, rows,
                o_c, m_c, True, c,
            )  # fmt: skip
        b_ak = tl.where(i > j, b_ak, 0.0)
    solve_chunk(
        tl.where(i > j, b_ab, 0.0), b_ak, beta_ptr + row * HV + i_h if DELTA else None, HV,
        v_ptr + (row * HV + i_h) * V, w_out_ptr + i_w, u_out_ptr + i_chunk_head * (V * C),
        None if DELTA else ak_ptr + i_a, r_ptr + i_a, keep, o_c, m_c, c,
    )  # fmt: skip
