"""Mamba-3: a state-space recurrence by the trapezoid rule, whose keys and queries turn."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.gated_scan.dispatch import run as gated_scan
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.ops._fp32 import result_dtype, widen
from slipstream.ops._preprocess import expect_inputs, in_time_order, scan_impl
from slipstream.ops.token_shift import token_shift
from slipstream.runtime.context_parallel import ContextParallel

States = tuple[Tensor, Tensor, Tensor, Tensor]


@checks.operator
def chunk_mamba3(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor,
    trap: Tensor,
    angles: Tensor,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    chunk_size: int | None = None,
    impl: str | None = None,
) -> tuple[Tensor, States | None]:
    """Mamba-3, chunkwise: what a token writes is its own input and the one before it.

        theta_t = theta_{t-1} + angles_t;  q_t, k_t turned by theta_t
        S_t = exp(g_t) (S_{t-1} + (1 - trap_t) dt_t sum_r k_{t-1,r} v_{t-1,r}^T)
              + trap_t dt_t sum_r k_{t,r} v_{t,r}^T
        o_{t,r} = scale * S_t^T q_{t,r}

    With R inputs and outputs a token it is the form called MIMO; SISO is R = 1. It is simple_gla
    of 2 R T tokens, those before each token and its own.

    Args:
        q, k: C and B, with their biases, [B, T, HV, R, K], before they are turned.
        v: inputs [B, T, HV, R, V].
        g: log decay [B, T, HV], at most 0, float32: A dt.
        dt: steps [B, T, HV], above 0, float32.
        trap: how much of a step counts at its end [B, T, HV], in (0, 1).
        angles: by how much a token turns pairs of channels, in radians [B, T, HV, P], P at most
            K / 2, float32: pair i is channels 2 i and 2 i + 1. Mamba-3's are pi dt tanh(...).
        scale: factor on the output; 1 if None.
        initial_state: before the first token, a tuple (S [N, HV, K, V], k turned [N, HV, R, K] and
            v [N, HV, R, V] of the token before, theta [N, HV, P]), float32; zeros if None.
        the others: as chunk_simple_gla.

    Returns:
        o [B, T, HV, R, V] in q's dtype, and the final states, a tuple like initial_state, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
        NotImplementedError: reverse with a context.

    Cost: that of chunk_simple_gla with 2 R T tokens, a gated scan of HV P channels, and a few
    passes over q, k and v. Angles add up in float32.
    Source: Mamba-3 (2026), as mamba_ssm 2.3 has it.
    """
    options = LinearOptions(scale, output_final_state, False, reverse, chunk_size, impl, context)
    given = _Given(q, k, v, g, dt, trap, angles)
    return _run(given, initial_state, cu_seqlens, options, recurrent=False)


@checks.operator
def fused_recurrent_mamba3(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor,
    trap: Tensor,
    angles: Tensor,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, States | None]:
    """Mamba-3, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_mamba3. Cost: 6 R T HV K V flops, one after the other.
    """
    options = LinearOptions(scale, output_final_state, False, reverse, None, impl, context)
    given = _Given(q, k, v, g, dt, trap, angles)
    return _run(given, initial_state, cu_seqlens, options, recurrent=True)


class _Given(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    dt: Tensor
    trap: Tensor
    angles: Tensor


def _run(
    given: _Given,
    initial_state: States | None,
    cu_seqlens: Tensor | None,
    options: LinearOptions,
    *,
    recurrent: bool,
) -> tuple[Tensor, States | None]:
    context = options.context
    if context is not None and torch.compiler.is_compiling():
        return context.eagerly(_run, given, initial_state, cu_seqlens, options, recurrent=recurrent)
    _check(given, initial_state, cu_seqlens, options)
    trapezoid = partial(_trapezoid, options=options._replace(reverse=False), recurrent=recurrent)
    states = initial_state or ()
    return in_time_order(
        trapezoid, tuple(given), states, cu_seqlens, context, reverse=options.reverse
    )


def _trapezoid(
    tensors: tuple[Tensor, ...],
    states: States | tuple[()],
    cu_seqlens: Tensor | None,
    options: LinearOptions,
    recurrent: bool,
) -> tuple[Tensor, States | None]:
    given = _Given(*tensors)
    q, k, theta = _turned(given, states, cu_seqlens, options)
    before, last = _before(k, given.v, states, cu_seqlens, options)
    S = states[0] if states else None
    o, S = _written(q, k, before, given, S, cu_seqlens, options, recurrent)
    if q.shape[3] > 1:
        o = (widen(o) + _of_itself(q, k, given, options.scale)).to(result_dtype(given.q))
    if S is None or last is None or theta is None:
        return o, None
    keys, values = last.split([k.shape[2:].numel(), given.v.shape[2:].numel()], dim=1)
    return o, (S, keys.unflatten(1, k.shape[2:]), values.unflatten(1, given.v.shape[2:]), theta)


def _turned(
    given: _Given, states: States | tuple[()], cu_seqlens: Tensor | None, options: LinearOptions
) -> tuple[Tensor, Tensor, Tensor | None]:
    """q and k turned, and theta after the last token [N, HV, P]."""
    angles = widen(given.angles)
    theta, last = gated_scan(
        angles.flatten(2),
        torch.zeros_like(angles).flatten(2),
        widen(states[3]).flatten(1) if states else None,
        options.output_final_state,
        False,
        cu_seqlens,
        scan_impl(options.impl),
        options.context,
    )
    theta = theta.view_as(angles)[:, :, :, None]  # [B, T, HV, 1, P]
    cos, sin = theta.cos(), theta.sin()
    found = [_rotated(x, cos, sin) for x in (given.q, given.k)]
    last = None if last is None else last.view(-1, *angles.shape[2:])
    return found[0], found[1], last


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Channels 2 i and 2 i + 1 of x [..., K] by angle i of P, in x's dtype."""
    width = 2 * cos.shape[-1]
    first, second = widen(x[..., :width]).unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack([first * cos - second * sin, first * sin + second * cos], -1)
    return torch.cat([pairs.flatten(-2).to(x.dtype), x[..., width:]], -1)


def _before(
    k: Tensor,
    v: Tensor,
    states: States | tuple[()],
    cu_seqlens: Tensor | None,
    options: LinearOptions,
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """k turned and v of the token before each, and both of the last [N, HV R K + HV R V]."""
    x = torch.cat([k.flatten(2), v.to(k.dtype).flatten(2)], -1)
    start = None
    if states:
        start = torch.cat([states[1].flatten(1), states[2].flatten(1)], -1).to(x.dtype)
    y, last = token_shift(
        x, initial_state=start, output_final_state=options.output_final_state,
        cu_seqlens=cu_seqlens, context=options.context,
    )  # fmt: skip
    keys, values = y.split([k.shape[2:].numel(), v.shape[2:].numel()], dim=-1)
    last = None if last is None else widen(last)
    return (keys.view(k.shape), values.view(v.shape)), last


def _written(
    q: Tensor,
    k: Tensor,
    before: tuple[Tensor, Tensor],
    given: _Given,
    S: Tensor | None,
    cu_seqlens: Tensor | None,
    options: LinearOptions,
    recurrent: bool,
) -> tuple[Tensor, Tensor | None]:
    """simple_gla of 2 R tokens a token: R write the token before, then one decays and R write and
    read, each after what those before it have written."""
    T, R = q.shape[1], q.shape[3]
    own = widen(given.trap * given.dt)[..., None, None]
    other = widen((1 - given.trap) * given.dt)[..., None, None]
    keys = torch.cat([before[0], k], 3)
    values = torch.cat([other * before[1], own * given.v], 3).to(k.dtype)
    reads = torch.cat([torch.zeros_like(q), q], 3)
    reads, keys, values = (x.transpose(2, 3).flatten(1, 2) for x in (reads, keys, values))
    g = torch.nn.functional.pad(widen(given.g)[:, :, None], (0, 0, R, R - 1)).flatten(1, 2)
    scale = 1.0 if options.scale is None else options.scale
    context = None if options.context is None else options.context.repeated(2 * R)
    offsets = None if cu_seqlens is None else cu_seqlens * (2 * R)
    o, S = run(
        LinearInputs(reads, keys, values, g=g, initial_state=S, cu_seqlens=offsets),
        options._replace(scale=scale, context=context),
        recurrent=recurrent,
    )
    return o.unflatten(1, (T, 2 * R))[:, :, R:].transpose(2, 3), S


def _of_itself(q: Tensor, k: Tensor, given: _Given, scale: float | None) -> Tensor:
    """What a token's outputs read of those of its inputs that _written has after them."""
    later = torch.ones(q.shape[3], q.shape[3], dtype=torch.bool, device=q.device).triu(1)
    scores = (widen(q) @ widen(k).mT) * widen(given.trap * given.dt)[..., None, None]
    return (scores * later * (1.0 if scale is None else scale)) @ widen(given.v)


def _check(
    given: _Given, states: States | None, cu_seqlens: Tensor | None, options: LinearOptions
) -> None:
    q, k, v, g, dt, trap, angles = given
    S, key, value, theta = states or (None,) * 4
    expect_inputs(
        cu_seqlens, options.context, q=(q, "B T HV R K"), k=(k, "B T HV R K"), v=(v, "B T HV R V"),
        g=(g, "B T HV"), dt=(dt, "B T HV"), trap=(trap, "B T HV"), angles=(angles, "B T HV P"),
        **{
            "initial_state[0]": (S, "N HV K V"), "initial_state[1]": (key, "N HV R K"),
            "initial_state[2]": (value, "N HV R V"), "initial_state[3]": (theta, "N HV P"),
        },
    )  # fmt: skip
    K, P = q.shape[-1], angles.shape[-1]
    if 2 * P > K:
        raise ValueError(f"angles: want at most K / 2 = {K // 2} pairs, got {P}")
