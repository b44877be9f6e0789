"""RWKV-7's decoding step in one launch; ../rwkv7_step.py has the formulas.

A program has one head of one sequence: its state [K, K] in registers, and of the four second
matrices the columns of its channels, which are read from the L2 cache for each sequence.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.time_mix.rwkv7 import EPS, SLOWEST_LOG_DECAY
from slipstream.kernels.time_mix.rwkv7_step import StepInputs
from slipstream.runtime.backends import device_of
from slipstream.runtime.launch_cache import cached

RANKS = 32  # rows of a second matrix at a time
ELEMENTS_PER_WARP = 1024  # of a state


@triton.jit
def _load(p, o, m):
    return tl.load(p + o, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _product(
    inner_ptr, up_ptr, bias_ptr, rank, o_d, m_d, D: tl.constexpr, BK: tl.constexpr,
    BR: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """f(inner) up + bias [BK] of the channels o_d."""
    acc = tl.zeros([BR, BK], tl.float32)
    for i in range(0, rank, BR):
        o_r = i + tl.arange(0, BR)
        b_x = _load(inner_ptr, o_r, o_r < rank)
        if F == "tanh":
            # by exp(-2 |x|), which no x makes infinite
            b_e = tl.exp(-2 * tl.abs(b_x))
            b_x = tl.where(b_x < 0, -1.0, 1.0) * (1 - b_e) / (1 + b_e)
        if F == "sigmoid":
            b_x = tl.sigmoid(b_x)
        m = (o_r < rank)[:, None] & m_d[None, :]
        acc += b_x[:, None] * _load(up_ptr, o_r[:, None] * D + o_d[None, :], m)
    b_y = tl.sum(acc, 0)
    if bias_ptr is not None:
        b_y += _load(bias_ptr, o_d, m_d)
    return b_y


@triton.jit(do_not_specialize=["w_rank", "a_rank", "g_rank", "v_rank"])
def rwkv7_step_kernel(
    x_ptr, r_ptr, k_ptr, v_ptr, w_ptr, a_ptr, g_ptr, v_gate_ptr, first_value_ptr,
    w_up_ptr, a_up_ptr, g_up_ptr, v_up_ptr, w_bias_ptr, a_bias_ptr, v_bias_ptr,
    k_k_ptr, k_a_ptr, weight_ptr, bias_ptr, r_k_ptr, state_ptr, shift_ptr, y_ptr,
    row_x, row_r, row_k, row_v, row_w, row_a, row_g, row_v_gate, row_first_value, row_shift,
    w_rank, a_rank, g_rank, v_rank, slowest, unit_eps, eps,
    D: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Grid (D / K, N). Tokens [N, D] or [N, rank], matrices [rank, D], state [N, D / K, K, K]; of
    v_gate, first_value, v_up and v_bias all or none are None."""
    h, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o = tl.arange(0, BK)
    m = o < K
    o_d = h * K + o
    p_s = state_ptr + (n * (D // K) + h) * K * K + o[:, None] * K + o[None, :]
    m_s = m[:, None] & m[None, :]
    # asked for first: it is on its way while the four products read their matrices
    b_s = tl.load(p_s, mask=m_s, other=0.0)
    b_r, b_k = _load(r_ptr + n * row_r, o_d, m), _load(k_ptr + n * row_k, o_d, m)
    b_v = _load(v_ptr + n * row_v, o_d, m)
    tl.store(shift_ptr + n * row_shift + o_d, tl.load(x_ptr + n * row_x + o_d, mask=m), mask=m)
    b_w = _product(w_ptr + n * row_w, w_up_ptr, w_bias_ptr, w_rank, o_d, m, D, BK, BR, "tanh")
    b_a = _product(a_ptr + n * row_a, a_up_ptr, a_bias_ptr, a_rank, o_d, m, D, BK, BR, "")
    b_gate = _product(g_ptr + n * row_g, g_up_ptr, None, g_rank, o_d, m, D, BK, BR, "sigmoid")
    if v_gate_ptr is not None:
        b_m = _product(
            v_gate_ptr + n * row_v_gate, v_up_ptr, v_bias_ptr, v_rank, o_d, m, D, BK, BR, ""
        )
        b_first = _load(first_value_ptr + n * row_first_value, o_d, m)
        b_v += (b_first - b_v) * tl.sigmoid(b_m)
    b_a = tl.sigmoid(b_a)
    b_unit = b_k * _load(k_k_ptr, o_d, m)
    b_unit *= tl.rsqrt(tl.sum(b_unit * b_unit, 0) + unit_eps)
    b_k *= 1 + (b_a - 1) * _load(k_a_ptr, o_d, m)
    # what is erased is read before the state decays
    b_read = -tl.sum(b_unit[:, None] * b_s, 0)
    b_s *= tl.exp(slowest * tl.sigmoid(b_w))[:, None]
    b_s += (b_unit * b_a)[:, None] * b_read[None, :] + b_k[:, None] * b_v[None, :]
    tl.store(p_s, b_s, mask=m_s)
    b_o = tl.sum(b_r[:, None] * b_s, 0)
    # channels past K hold 0, which less the mean would count in the variance
    b_o = tl.where(m, b_o - tl.sum(b_o, 0) / K, 0.0)
    b_o *= tl.rsqrt(tl.sum(b_o * b_o, 0) / K + eps)
    b_bonus = tl.sum(b_r * b_k * _load(r_k_ptr, o_d, m), 0)
    b_y = b_o * _load(weight_ptr, o_d, m) + _load(bias_ptr, o_d, m) + b_bonus * b_v
    tl.store(y_ptr + n * D + o_d, (b_y * b_gate).to(y_ptr.dtype.element_ty), mask=m)


def step(t: StepInputs, state: Tensor, shift: Tensor, eps: float) -> Tensor:
    """As ../rwkv7_step.py's."""
    N, D = t.x.shape
    K = state.shape[-1]
    BK = max(16, triton.next_power_of_2(K))
    tokens = {
        name: x if x is None or x.stride(-1) == 1 else x.contiguous()
        for name, x in t._asdict().items()
    }
    rows = {
        f"row_{name}": 0 if x is None else x.stride(0)
        for name, x in [*tokens.items()][: StepInputs._fields.index("w_up")]
    }
    y = torch.empty(N, D, dtype=t.x.dtype, device=t.x.device)
    with device_of(t.x.device):
        cached(rwkv7_step_kernel)[D // K, N](
            **{f"{name}_ptr": x for name, x in tokens.items()},
            **rows,
            state_ptr=state,
            shift_ptr=shift,
            y_ptr=y,
            row_shift=shift.stride(0),
            w_rank=t.w.shape[1],
            a_rank=t.a.shape[1],
            g_rank=t.g.shape[1],
            v_rank=0 if t.v_gate is None else t.v_gate.shape[1],
            slowest=SLOWEST_LOG_DECAY,
            unit_eps=EPS,
            eps=eps,
            D=D,
            K=K,
            BK=BK,
            BR=RANKS,
            num_warps=max(1, min(16, BK * BK // ELEMENTS_PER_WARP)),
        )
    return y
