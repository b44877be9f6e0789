"""Per-channel decay, or free a and b: scores of reads that have decayed too far for one product.

wy.py has the other reads of a strong chunk as in weak chunks, for their bits must not depend on
later gates. The scores of these are summed step by step (gate_sums.py).
"""

import triton
import triton.language as tl

from slipstream.kernels.linear.triton.common.gate_ones import BASE, EDGES, KINDS
from slipstream.kernels.linear.triton.dplr import gate_sums


@triton.jit
def _products(b_r, b_b, b_k, factor, DELTA: tl.constexpr, dtype: tl.constexpr, PRECISION):
    """r b^T and r k^T of reads and writes times a factor each; of DELTA r b^T and b b^T."""
    b_r, b_w = (b_r * factor[0]).to(dtype), tl.trans((b_b * factor[1]).to(dtype))
    b_1 = tl.dot(b_r, b_w, input_precision=PRECISION)
    if DELTA:
        b_b = (b_b * factor[0]).to(dtype)
        b_2 = tl.dot(b_b, b_w, input_precision=PRECISION)
    else:
        b_k = (b_k * factor[1]).to(dtype)
        b_2 = tl.dot(b_r, tl.trans(b_k), input_precision=PRECISION)
    return b_1, b_2


@triton.jit
def _add_step(
    b_1, b_2, b_r, b_b, b_k, b_factor, rows, step, o_c,
    DELTA: tl.constexpr, dtype: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b_x, b_y = _products(b_r, b_b, b_k, (b_factor, b_factor), DELTA, dtype, PRECISION)
    seen = gate_sums.is_pair_of_step(o_c[:, None], o_c[None, :], step) & rows
    return b_1 + tl.where(seen, b_x, 0.0), b_2 + tl.where(seen, b_y, 0.0)


@triton.jit
def _add_channels(b_1, b_2, b_r, b_b, b_k, rows, gates, o_c, BEFORE: tl.constexpr, c):
    """Adds the scores of _products below the diagonal, of BK channels."""
    KIND: tl.constexpr = KINDS.BOTH if BEFORE else KINDS.WRITES
    dtype: tl.constexpr = b_r.dtype
    b_read, b_write, first, safe = gate_sums.block_factors(
        gates, o_c, c.LIMIT, c.SHIFT, BEFORE, c.FP32, c.PRECISION
    )
    b_x, b_y = _products(b_r, b_b, b_k, (b_read, b_write), c.DELTA, dtype, c.PRECISION)
    i = o_c[:, None]
    seen = ((i >> BASE) == (o_c[None, :] >> BASE)) & rows
    b_1 += tl.where(seen, b_x, 0.0)
    b_2 += tl.where(seen, b_y, 0.0)
    for step in range(first, BASE + 1):
        b_e = gate_sums.sums_between(gates, EDGES.MIDDLE + step - 1, o_c, KIND, c.FP32, c.PRECISION)
        # a token of a later half reads: where it is safe, the block has it
        block_has = safe & (((i >> (step - 1)) & 1) == 1)
        b_e = tl.where(block_has, 0.0, tl.exp2(b_e))
        b_1, b_2 = _add_step(
            b_1, b_2, b_r, b_b, b_k, b_e, rows, step, o_c, c.DELTA, dtype, c.PRECISION
        )
    for step in range(BASE + 1, c.STEPS + 1):
        b_e = gate_sums.sums_between(gates, EDGES.MIDDLE + step - 1, o_c, KIND, c.FP32, c.PRECISION)
        b_e = tl.exp2(b_e)
        b_1, b_2 = _add_step(
            b_1, b_2, b_r, b_b, b_k, b_e, rows, step, o_c, c.DELTA, dtype, c.PRECISION
        )
    return b_1, b_2


@triton.jit
def add_decayed(
    scores, p_r, p_b, p_k, p_b_end, p_k_end, p_g, ones_ptr, rows, o_c, m_c, BEFORE: tl.constexpr, c
):
    """Scores [C, C] of reads r with writes b and k, of which `rows` [C, 1] are made here; of DELTA
    those of r with b, and of b with b. What is above the diagonal is left undefined.

    BEFORE: r is a, which sees the state before its token, so that the diagonal is left undefined,
    too. Otherwise b and k times their decay to the chunk's end go to p_b_end and p_k_end. p_r to
    p_g: [C, 1], of the first channel.
    """
    C: tl.constexpr = o_c.shape[0]
    dtype: tl.constexpr = p_r.dtype.element_ty
    b_1 = tl.where(rows, 0.0, scores[0])
    b_2 = tl.where(rows, 0.0, scores[1])
    b_rb = tl.zeros((C,), tl.float32)
    b_rk = tl.zeros((C,), tl.float32)
    for n in range(c.WIDE // c.BK):
        o_k = n * c.BK + tl.arange(0, c.BK)[None, :]
        m_k = m_c[:, None]
        if c.K != c.WIDE:
            m_k = m_k & (o_k < c.K)
        gates = (
            gate_sums.split_gates(gate_sums.load_gates_of(p_g + o_k * c.CHANNEL, m_k), c.FP32),
            ones_ptr,
        )
        b_r = tl.load(p_r + o_k, mask=m_k, other=0.0)
        b_b = tl.load(p_b + o_k, mask=m_k, other=0.0)
        b_k = b_b
        if not c.DELTA:
            b_k = tl.load(p_k + o_k, mask=m_k, other=0.0)
        if not BEFORE:
            b_e = gate_sums.to_end(gates, o_c, c.FP32, c.PRECISION)
            tl.store(p_b_end + o_k, (b_b * b_e).to(dtype))
            b_rb += tl.sum(b_r.to(tl.float32) * b_b, 1)
            if not c.DELTA:
                tl.store(p_k_end + o_k, (b_k * b_e).to(dtype))
                b_rk += tl.sum(b_r.to(tl.float32) * b_k, 1)
        b_1, b_2 = _add_channels(b_1, b_2, b_r, b_b, b_k, rows, gates, o_c, BEFORE, c)
    if not BEFORE:
        same = (o_c[:, None] == o_c[None, :]) & rows
        b_1 = tl.where(same, b_rb[:, None], b_1)
        if not c.DELTA:
            b_2 = tl.where(same, b_rk[:, None], b_2)
    return b_1, b_2
