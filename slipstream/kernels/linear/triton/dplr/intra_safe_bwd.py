"""Per-channel decay, or free a and b: gradients of q, k, a, b and the gates, of strong chunks.

As dqkg.py, but the scores' part step by step (gate_sums.py),

    dq = exp(G) scale do S^T + sum over steps of exp(e) (dqb (b exp(e)) + dqk (k exp(e)))
    da = exp(G) z S^T        + sum of            exp(e) (dab (b exp(e)) + dak (k exp(e)))
    db = exp(G_C - G) x dS'^T + sum of exp(e) (dqb^T (q exp(e)) + dab^T (a exp(e)))
    dk = exp(G_C - G) v dS'^T + sum of exp(e) (dqk^T (q exp(e)) + dak^T (a exp(e)))

and the gates' gradients from sums that run as those of the exponents do: dg_t comes of the pairs
i >= t > j alone, except for pairs within a block of the first step, whose shares before and after t
cancel.
"""

from collections import namedtuple

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.common import gate_ones
from slipstream.kernels.linear.triton.common.gate_ones import EDGES, KINDS
from slipstream.kernels.linear.triton.delta.solve_tril import locate_chunk
from slipstream.kernels.linear.triton.dplr import gate_sums
from slipstream.kernels.linear.triton.scalar_decay.chunk import load_block

# constants of a launch, for device functions
Constants = namedtuple("Constants", "STEPS C FP32 PRECISION")
# what a read or a write meets: m and n, and the gradients of the scores with them
Partners = namedtuple("Partners", "m dm n dn")


@triton.jit
def _times_states(
    p, stride, p_states, o_c, m_c, o_k,
    V: tl.constexpr, WIDE: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    BY_CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows [C, V] of a chunk, from tokens or BY_CHUNK, transposed, times its states [V, BK]."""
    b_d = tl.zeros((C, BK), tl.float32)
    for n in range(tl.cdiv(V, BV)):
        o_v = n * BV + tl.arange(0, BV)
        m_v = (o_v < V)[:, None]
        if BY_CHUNK:
            p_x = p + o_v[:, None] * C + o_c[None, :]
            b_x = tl.trans(tl.load(p_x, mask=m_v & m_c[None, :], other=0.0))  # [C, BV]
        else:
            b_x = load_block(p, stride, o_c, m_c, o_v, V, V % BV != 0)
        p_s = p_states + o_v[:, None] * WIDE + o_k[None, :]
        b_s = tl.load(p_s, mask=m_v, other=0.0)  # [BV, BK]
        b_d = tl.dot(b_x, b_s, b_d, input_precision=PRECISION)
    return b_d


@triton.jit
def _through_scores(
    p_dm, b_m, p_dn, b_n, o_c, step, first, C, WRITE: tl.constexpr, TWO: tl.constexpr, PRECISION
):
    """dm m + dn n [C, BK] of the pairs of a step; dm, dn [i, j], or [j, i] for a WRITE."""
    i = o_c[None, :] if WRITE else o_c[:, None]
    j = o_c[:, None] if WRITE else o_c[None, :]
    seen = gate_sums.pairs_of_step(i, j, step, first)
    b_a = tl.load(p_dm + i * C + j)
    b_a = tl.where(seen, b_a, 0.0).to(b_m.dtype)
    b_d = tl.dot(b_a, b_m, input_precision=PRECISION)
    if TWO:
        b_a = tl.load(p_dn + i * C + j)
        b_a = tl.where(seen, b_a, 0.0).to(b_m.dtype)
        b_d = tl.dot(b_a, b_n, b_d, input_precision=PRECISION)
    return b_d


@triton.jit
def _gradient(
    b_d, b_dg, b_share, p_diag, partners, m_k, gates, o_c, WRITE: tl.constexpr,
    BEFORE: tl.constexpr, N_BEFORE: tl.constexpr, TWO: tl.constexpr, c,
):  # fmt: skip
    """Gradient d [C, BK] of a read or WRITE by way of its scores with m and, if TWO, with n.

    d is what came by way of the states; dm and dn are the gradients of those scores. All of it
    times own goes to the gates' gradient. share is a factor of a second read: of own, or of n.
    """
    KIND: tl.constexpr = KINDS.READS if BEFORE else KINDS.WRITES
    b_m = tl.load(partners.m, mask=m_k, other=0.0)
    act = b_m.dtype
    b_n = b_m
    if TWO:
        b_n = tl.load(partners.n, mask=m_k, other=0.0)
        if WRITE:
            b_n = (b_n * b_share).to(act)
    if WRITE:
        b_diag = tl.load(p_diag, mask=m_k, other=0.0).to(tl.float32)
        b_d *= gate_sums.to_end(gates, o_c, c.FP32, c.PRECISION)
        b_seen = gate_ones.load_ones(gates[1], EDGES.START, c.C, KINDS.READS)
    else:
        b_diag = tl.load(p_diag, mask=m_k, other=0.0) * b_share
        b_d *= gate_sums.from_start(gates, o_c, KIND, c.FP32, c.PRECISION)
        b_seen = gate_ones.load_ones(gates[1], EDGES.START, c.C, KIND, True)
    b_dg += gate_sums.sums_bwd(b_seen, b_d * b_diag, c.FP32, c.PRECISION)
    first = gates[3]
    for step in range(tl.maximum(first, 1), c.STEPS + 1):
        b_sum = gate_sums.sums_between(
            gates, EDGES.MIDDLE + step - 1, o_c, KINDS.WRITES, c.FP32, c.PRECISION
        )
        b_before = b_sum
        if N_BEFORE or BEFORE:
            b_before = gate_sums.sums_between(
                gates, EDGES.MIDDLE + step - 1, o_c, KINDS.READS, c.FP32, c.PRECISION
            )
        b_e = tl.exp2(gate_sums.signed(b_sum, o_c, step, first, not WRITE))
        b_me = (b_m * b_e).to(act)
        if N_BEFORE:
            b_e = tl.exp2(gate_sums.signed(b_before, o_c, step, first, not WRITE))
        b_ne = (b_n * b_e).to(act)
        b_t = _through_scores(
            partners.dm, b_me, partners.dn, b_ne, o_c, step, first, c.C, WRITE, TWO, c.PRECISION
        )
        b_e = tl.exp2(gate_sums.signed(b_before if BEFORE else b_sum, o_c, step, first, WRITE))
        # as the other's products have it, so that what cancels in a block does so to the last bits
        b_rounded = (b_diag.to(act) * b_e).to(act)
        b_rounded = gate_sums.signed(b_rounded * b_t, o_c, step, first, WRITE)
        b_seen = gate_ones.load_ones(gates[1], EDGES.MIDDLE + step - 1, c.C, KIND, True)
        b_dg += gate_sums.product_of_gates(b_seen, b_rounded, c.FP32, c.PRECISION)
        b_d += b_t * b_e
    return b_d, b_dg


@triton.jit(do_not_specialize=["scale", "T", "N", "HV", "H", "tokens"])
def dplr_intra_safe_bwd_kernel(
    q_ptr,  # [tokens, H, K]
    k_ptr,
    a_ptr,  # none for delta
    b_ptr,
    g_ptr,  # [tokens, HV, K] or [tokens, HV]
    beta_ptr,  # [tokens, HV], delta
    v_ptr,  # [tokens, HV, V], dplr
    do_ptr,  # [tokens, HV, V]
    x_ptr,  # [chunks, HV, V, C]
    y_ptr,
    states_ptr,  # [chunks, HV, V, WIDE]
    dstates_ptr,
    dqb_ptr,  # [chunks, HV, C, C]
    dab_ptr,
    dqk_ptr,  # dplr
    dak_ptr,
    diag_ptr,  # [chunks, HV, 2, C]: gradients of the scores qb and qk of pairs (i, i)
    dq_ptr,  # [tokens, HV, K]
    dk_ptr,
    da_ptr,  # dplr
    db_ptr, dg_ptr,
    dbeta_ptr,  # [1 + NK, tokens, HV], delta, except for the first
    strong_ptr,  # [chunks, HV]: of wy.py; 2 is strong
    ones_ptr,  # gate_ones.py's
    cu_ptr,  # [N + 1]
    scale, T, N, HV, H, tokens,
    K: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, STEPS: tl.constexpr, DELTA: tl.constexpr, CHANNEL: tl.constexpr,
    PACKED: tl.constexpr, FP32: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grid (ceil(K / BK) * HV * chunks,): BK channels of one chunk and value head a program."""
    c: tl.constexpr = Constants(STEPS, C, FP32, PRECISION)
    NK: tl.constexpr = (K + BK - 1) // BK
    GK: tl.constexpr = K**CHANNEL
    act = q_ptr.dtype.element_ty
    pid = tl.program_id(0)
    i_chunk_head = (pid // NK).to(tl.int64)
    # most programs end here: dqkg.py's gradients of a weak chunk stand
    if tl.load(strong_ptr + i_chunk_head) < 2:
        return
    i_k = pid % NK
    i_h = (pid // NK) % HV
    begin, length, i_c = locate_chunk(cu_ptr, pid // NK // HV, T, N, C, PACKED)
    o_c = tl.arange(0, C)
    i = o_c[:, None]
    o_k = i_k * BK + tl.arange(0, BK)
    m_c = o_c < length - i_c * C
    row = begin + i_c * C
    i_v = (row * HV + i_h) * V
    i_a = i_chunk_head * (C * C)
    i_x = i_chunk_head * (V * C)
    i_s = i_chunk_head * (V * WIDE)
    i_q = (row * H + i_h // (HV // H)) * K
    o_q = i * (H * K) + o_k[None, :]
    p_q = q_ptr + i_q + o_q
    p_k = k_ptr + i_q + o_q
    p_a = p_k
    p_b = p_k
    b_sign = 1.0
    if DELTA:
        o_t = (row + o_c) * HV + i_h
        b_sign = -tl.load(beta_ptr + o_t, mask=m_c, other=0.0).to(tl.float32)[:, None]  # z / y
    else:
        p_a = a_ptr + i_q + o_q
        p_b = b_ptr + i_q + o_q
    m_k = m_c[:, None]
    if K % BK != 0:
        m_k = m_k & (o_k < K)[None, :]
    gates = gate_sums.load_channel_gates(
        ones_ptr, g_ptr, (row * HV + i_h) * GK, HV * GK, o_c, m_k, o_k,
        CHANNEL, STEPS, LIMIT, FP32, PRECISION,
    )  # fmt: skip
    b_dg = tl.zeros((C, BK), tl.float32)
    b_z = tl.zeros((BK,), tl.float32)
    for n in range(tl.cdiv(V, BV)):
        o_v = n * BV + tl.arange(0, BV)
        o_s = i_s + o_v[:, None] * WIDE + o_k[None, :]
        m_s = (o_v < V)[:, None]
        b_s = tl.load(states_ptr + o_s, mask=m_s, other=0.0).to(tl.float32)
        # all gates of the chunk decay what passes through it
        b_z += tl.sum(b_s * tl.load(dstates_ptr + o_s, mask=m_s, other=0.0), 0)
    b_dg += (b_z * tl.exp2(gates[2]))[None, :]
    i_o = (row * HV + i_h) * K
    o_o = i * (HV * K) + o_k[None, :]
    p_qb = dqb_ptr + i_a
    p_ab = dab_ptr + i_a
    p_qk = (dqb_ptr if DELTA else dqk_ptr) + i_a
    p_ak = (dab_ptr if DELTA else dak_ptr) + i_a
    b_qb = tl.load(diag_ptr + i_chunk_head * (2 * C) + o_c)[:, None]
    b_qk = tl.load(diag_ptr + i_chunk_head * (2 * C) + C + o_c)[:, None]

    b_d = _times_states(
        do_ptr + i_v, HV * V, states_ptr + i_s, o_c, m_c, o_k,
        V, WIDE, BV, BK, C, False, PRECISION,
    ) * scale  # fmt: skip
    b_d, b_dg = _gradient(
        b_d, b_dg, 1.0, p_q, Partners(p_b, p_qb, p_k, p_qk), m_k, gates, o_c, False, False, False,
        not DELTA, c,
    )  # fmt: skip
    # pairs (i, i) decay by nothing, and are in no level
    b_d += b_qb * tl.load(p_b, mask=m_k, other=0.0)
    if not DELTA:
        b_d += b_qk * tl.load(p_k, mask=m_k, other=0.0)
    tl.store(dq_ptr + i_o + o_o, b_d.to(act), mask=m_k)

    b_da = _times_states(
        y_ptr + i_x, 0, states_ptr + i_s, o_c, m_c, o_k, V, WIDE, BV, BK, C, True, PRECISION
    )
    b_da, b_dg = _gradient(
        b_da, b_dg, b_sign, p_a, Partners(p_b, p_ab, p_k, p_ak), m_k, gates, o_c, False, not DELTA,
        False, not DELTA, c,
    )  # fmt: skip
    if DELTA:
        o_t += (1 + i_k) * (tokens.to(tl.int64) * HV)
        b_k = tl.load(p_k, mask=m_k, other=0.0)
        tl.store(dbeta_ptr + o_t, -tl.sum(b_da * b_k, 1), mask=m_c)
        b_da *= b_sign
    else:
        tl.store(da_ptr + i_o + o_o, b_da.to(act), mask=m_k)

    b_d = _times_states(
        x_ptr + i_x, 0, dstates_ptr + i_s, o_c, m_c, o_k, V, WIDE, BV, BK, C, True, PRECISION
    )
    b_d, b_dg = _gradient(
        b_d, b_dg, b_sign, p_b, Partners(p_q, p_qb, p_a, p_ab), m_k, gates, o_c, True, False,
        not DELTA, True, c,
    )  # fmt: skip
    b_d += b_qb * tl.load(p_q, mask=m_k, other=0.0)
    if DELTA:
        # k both erases and writes: the sum of both gradients is rounded once
        tl.store(dk_ptr + i_o + o_o, (b_d + b_da).to(act), mask=m_k)
    else:
        tl.store(db_ptr + i_o + o_o, b_d.to(act), mask=m_k)
        b_d = _times_states(
            v_ptr + i_v, HV * V, dstates_ptr + i_s, o_c, m_c, o_k,
            V, WIDE, BV, BK, C, False, PRECISION,
        )  # fmt: skip
        b_d, b_dg = _gradient(
            b_d, b_dg, 1.0, p_k, Partners(p_q, p_qk, p_a, p_ak), m_k, gates, o_c, True, False, True,
            True, c,
        )  # fmt: skip
        b_d += b_qk * tl.load(p_q, mask=m_k, other=0.0)
        tl.store(dk_ptr + i_o + o_o, b_d.to(act), mask=m_k)
    tl.store(dg_ptr + i_o + o_o, b_dg, mask=m_k)
