"""Mamba-3: a state-space recurrence by the trapezoid rule, whose keys and queries turn."""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.gated_scan.dispatch import run as gated_scan
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.ops._fp32 import result_dtype, widen
from slipstream.ops._running_sums import time_turned
from slipstream.ops.rwkv4 import sequences
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
        output_final_state: return the states after the last token too.
        reverse: run time backwards; the final states are then those before the first token.
        cu_seqlens: offsets [N+1] of N sequences packed in B == 1, int32 or int64.
        context: a slipstream.parallel.ContextParallel, with this rank's tokens, the states of all
            sequences and no cu_seqlens. None: one rank has all tokens.
        chunk_size: a hint, tokens a chunk in plain torch, a power of two from 16 to 256; Triton's
            kernels have their own. Chosen if None.
        impl: None chooses; "sm90", "triton", "eager" or "reference" is used or refused.

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
    N = _check(given, initial_state, cu_seqlens, options)
    dtype, backwards = result_dtype(given.q), options.reverse
    if backwards:
        turned, cu_seqlens = time_turned(tuple(given), cu_seqlens)
        given = _Given(*turned)
        if cu_seqlens is not None and initial_state is not None:
            initial_state = tuple(x.flip(0) for x in initial_state)  # type: ignore[assignment]
    q, k, theta = _turned(given, initial_state, cu_seqlens, options)
    before, last = _before(k, given.v, initial_state, cu_seqlens, options)
    S = None if initial_state is None else initial_state[0]
    o, S = _written(q, k, before, given, S, cu_seqlens, options, recurrent)
    if q.shape[3] > 1:
        o = (widen(o) + _of_itself(q, k, given, options.scale)).to(dtype)
    if not options.output_final_state:
        return o.flip(1) if backwards else o, None
    assert S is not None and last is not None and theta is not None
    width = k.shape[2:].numel()
    keys = last[:, :width].view(N, *k.shape[2:])
    states = S, keys, last[:, width:].view(N, *given.v.shape[2:]), theta
    if backwards:
        o = o.flip(1)
        if cu_seqlens is not None:
            states = tuple(x.flip(0) for x in states)
    return o, states  # type: ignore[return-value]


def _turned(
    given: _Given, states: States | None, cu_seqlens: Tensor | None, options: LinearOptions
) -> tuple[Tensor, Tensor, Tensor | None]:
    """q and k turned, and theta after the last token [N, HV, P]."""
    turns = widen(given.angles)
    theta, last = gated_scan(
        turns.flatten(2),
        torch.zeros_like(turns).flatten(2),
        None if states is None else widen(states[3]).flatten(1),
        options.output_final_state,
        False,
        cu_seqlens,
        "triton" if options.impl == "sm90" else options.impl,
        options.context,
    )
    theta = theta.view_as(turns)[:, :, :, None]  # [B, T, HV, 1, P]
    cos, sin = theta.cos(), theta.sin()
    found = [_rotated(x, cos, sin) for x in (given.q, given.k)]
    last = None if last is None else last.view(-1, *turns.shape[2:])
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
    states: States | None,
    cu_seqlens: Tensor | None,
    options: LinearOptions,
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """k turned and v of the token before each, and both of the last [N, HV R K + HV R V]."""
    x = torch.cat([k.flatten(2), v.to(k.dtype).flatten(2)], -1)
    start = None
    if states is not None:
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
        options._replace(scale=scale, reverse=False, context=context),
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
) -> int:
    """How many sequences there are, or an error."""
    q, k, v, g, dt, trap, angles = given
    checks.expect_layouts(
        q=(q, "B T HV R K"), k=(k, "B T HV R K"), v=(v, "B T HV R V"), g=(g, "B T HV"),
        dt=(dt, "B T HV"), trap=(trap, "B T HV"), angles=(angles, "B T HV P"),
    )  # fmt: skip
    N = sequences(q, cu_seqlens, options.reverse, options.context)
    (HV, R, K), V, P = q.shape[2:], v.shape[-1], angles.shape[-1]
    if 2 * P > K:
        raise ValueError(f"angles: want at most K / 2 = {K // 2} pairs, got {P}")
    named: dict[str, Tensor] = dict(given._asdict())
    if states is not None:
        if not isinstance(states, tuple) or len(states) != 4:
            raise TypeError(
                "initial_state: want a tuple (S [N, HV, K, V], k [N, HV, R, K], v [N, HV, R, V], "
                f"theta [N, HV, P]), got {type(states).__name__}"
            )
        shapes = (N, HV, K, V), (N, HV, R, K), (N, HV, R, V), (N, HV, P)
        for i, (state, shape) in enumerate(zip(states, shapes)):
            checks.expect_shape(f"initial_state[{i}]", state, shape)
            named[f"initial_state[{i}]"] = state
    checks.expect_floating(named)
    checks.expect_one_device({**named, "cu_seqlens": cu_seqlens})
    return N
