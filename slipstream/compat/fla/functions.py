"""Functions of fla.ops that are no operators of Slipstream, in plain torch or on its operators.

Formulas only; shapes, dtypes and defaults are fla's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.ops import _preprocess, activation, rwkv
from slipstream.ops._fp32 import widen
from slipstream.ops.attention import attention
from slipstream.ops.attnres import attnres

# attention


def attn_decoding_one_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    do_gate_scale: bool = False,
    *,
    window_size: int | None = None,
    sink_bias: Tensor | None = None,
) -> Tensor:
    """One query for each of N packed sequences of keys: q [1, N, HQ, K], k [1, T, H, K].

    Args:
        do_gate_scale: the gate takes the scale of the scores too.

    Returns:
        o [1, N, HQ, V]; 0 where a sequence is empty or the window is 0.
    """
    if cu_seqlens is None:
        raise ValueError("cu_seqlens: want the offsets [N+1] of the keys, got None")
    if g is not None and do_gate_scale:
        g = g.float() * (k.shape[-1] ** -0.5 if scale is None else scale)
    queries = torch.arange(q.shape[1] + 1, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return attention(
        q,
        k,
        v,
        g=g,
        scale=scale,
        window_size=window_size,
        sinks=sink_bias,
        cu_seqlens=queries,
        cu_seqlens_k=cu_seqlens,
    )


def fused_attnres(
    query: Tensor,
    residuals: Sequence[Tensor],
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    return_weights: bool = False,
    checkpoint_level: int = 1,
) -> Any:
    """Attention over the depth: a weighted sum of the L residual streams of one token.

        p = softmax over l of scale * query . rms_norm(r_l) * rms_weight        o = sum_l p_l r_l

    Args:
        query: [D] or [D, 1]. residuals: L tensors [..., D]. rms_weight: [D].
        output_rms_weight: [D], of a norm of o; None is no norm.
        checkpoint_level: no effect.

    Returns:
        o [..., D], or with return_weights (o, p [L, ...]).

    Source: Attention Residuals (2026), arXiv 2603.15031.
    """
    return attnres(
        query.flatten(), list(residuals), rms_weight.flatten(), output_rms_weight, rms_eps=rms_eps,
        scale=scale, return_weights=return_weights,
    )  # fmt: skip


# gates


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """-exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)).

    g [..., H, K], A_log [H], dt_bias [H K].
    """
    rows = g.reshape(1, -1, *g.shape[-2:])
    return _preprocess.delta_gate(rows, A_log, dt_bias, lower_bound).view(g.shape).to(output_dtype)


def fused_gdn_gate(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """-exp(A_log) softplus(g + dt_bias), of g [..., HV], A_log [HV] and dt_bias [HV]."""
    rows = g.reshape(1, -1, g.shape[-1])
    return _preprocess.delta_gate(rows, A_log, dt_bias).view(g.shape).to(output_dtype)


def fused_beta_sigmoid(x: Tensor, scale: float = 1.0) -> Tensor:
    """scale sigmoid(x), in float32."""
    return scale * x.float().sigmoid()


def fused_additive_gate(
    x: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    gate_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and log decays that keep a state a mean, weighted by exp(x).

        z_t = log(exp(z_{t-1}) + exp(x_t))        k_t = exp(x_t - z_t)        g_t = z_{t-1} - z_t

    Args:
        x: [B, T, H, K]. initial_state: z_0 [N, 1, H, K], float32; -inf if None.

    Returns:
        k, g [B, T, H, K] (g is 0 where nothing is before), and the last z [N, 1, H, K], float32.
    """
    if cu_seqlens is None:
        parts, N = [x], x.shape[0]
    else:
        parts, N = list(x.split(cu_seqlens.diff().tolist(), dim=1)), len(cu_seqlens) - 1
    if initial_state is None:
        initial_state = x.new_full((N, 1, *x.shape[2:]), float("-inf"), dtype=torch.float32)
    starts = [initial_state] if cu_seqlens is None else list(initial_state.split(1))
    keys, gates, last = [], [], []
    for part, start in zip(parts, starts):
        z = torch.cat([start, part.float()], dim=1).logcumsumexp(1)
        keys.append((part - z[:, 1:]).exp())
        gate = z[:, :-1] - z[:, 1:]
        gates.append(torch.where(z[:, :-1] == float("-inf"), 0.0, gate))
        last.append(z[:, -1:])
    k, g = torch.cat(keys, dim=1), torch.cat(gates, dim=1)
    return k.to(output_dtype or x.dtype), g.to(gate_dtype or x.dtype), torch.cat(last)


# RWKV-4 and RWKV-7; elementwise functions compute in float32 and round once, as fla's do


def fused_recurrent_rwkv4(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """slipstream.ops.fused_recurrent_rwkv4 with a decay of -exp(w) and a state [B, 3, 1, D].

    The state's rows are numerator and denominator, both by exp(-row 2); what is returned has the
    denominator 1.
    """
    numerator, denominator, exponent = state.float().squeeze(2).unbind(1)
    some = denominator > 0
    mean = torch.where(some, numerator / torch.where(some, denominator, 1), 0)
    z = torch.where(some, exponent + torch.where(some, denominator, 1).log(), -torch.inf)
    o, last = rwkv.fused_recurrent_rwkv4(
        -w.float().exp(), u, k, v, initial_state=(mean, z), output_final_state=True
    )
    assert last is not None
    after = torch.stack([last[0], torch.ones_like(last[0]), last[1]], 1)
    return o, after[:, :, None].to(k.dtype)


def fused_addcmul_rwkv7(
    hidden_states: Tensor,
    delta: Tensor,
    xr: Tensor,
    xw: Tensor,
    xk: Tensor,
    xv: Tensor,
    xa: Tensor,
    xg: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """hidden_states + delta * x for each x, in the order of the arguments; None for no xg."""
    dtype, hidden, delta = hidden_states.dtype, widen(hidden_states), widen(delta)
    each = (xr, xw, xk, xv, xa, xg)
    return tuple(None if x is None else hidden.addcmul(delta, widen(x)).to(dtype) for x in each)


def fused_k_rwkv7(
    k: Tensor,
    a: Tensor,
    ka: Tensor,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Tensor:
    """k + k (a - 1) ka. The offsets have no effect."""
    return (widen(k) * ((widen(a) - 1) * widen(ka) + 1)).to(k.dtype)


def gate_output_correction(
    o: Tensor, r: Tensor, k: Tensor, r_k: Tensor, v: Tensor, g: Tensor
) -> Tensor:
    """(o + (sum over K of r k r_k) v) g, of o, g [B, T, H D], r, k, v [B, T, H, D], r_k [H, D]."""
    correction = (widen(r) * widen(k) * widen(r_k)).sum(-1, keepdim=True) * widen(v)
    return ((widen(o) + correction.reshape(o.shape)) * widen(g)).to(o.dtype)


def channel_mixing_rwkv7(
    x: Tensor,
    x_prev: Tensor,
    x_k: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    inplace: bool = True,
) -> tuple[Tensor, Tensor]:
    """RWKV-7's channel mixing, and x[-1], as fla returns it.

        k_t = x_t + (x_{t-1} - x_t) x_k        y = max(k key_weight, 0)^2 value_weight

    Args:
        x: [B, T, D]. x_prev: [B, D], the token before. x_k: [D] or [1, 1, D].
        key_weight: [D, F]. value_weight: [F, D]. inplace: no effect.
    """
    before = x_prev.unsqueeze(1) if x_prev.dim() == 2 else x_prev
    now, mix = widen(x), widen(x_k)
    delta = torch.cat([widen(before), now[:, :-1]], dim=1) - now
    hidden = activation.squared_relu(now.addcmul(delta, mix).to(x.dtype) @ key_weight)
    return hidden @ value_weight, x[-1]
