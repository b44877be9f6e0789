"""Mamba's recurrences: the selective scan, and Mamba-3's by the trapezoid rule, whose keys and
queries turn.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.elementwise.rotation import product, rotate_qk
from slipstream.kernels.gated_scan.op import run as gated_scan
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.selective_scan import inputs, op
from slipstream.ops import _fp32, _preprocess
from slipstream.ops.token_shift import token_shift
from slipstream.runtime import context_in_segments, context_parallel, dispatch, trees


@checks.operator
@trees.by_levels
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Selective state space model: a state of N numbers for every channel.

        dt_t = softplus(delta_t + delta_bias)
        h_t  = exp(dt_t A) h_{t-1} + dt_t B_t u_t
        y_t  = (sum_n C_t h_t + D u_t) silu(z_t)

    Args:
        u: inputs [B, T, D], any floating dtype.
        delta: step sizes [B, T, D].
        A: [D, N], at most 0: decay rates.
        B, C: [B, T, N], or [B, T, G, N] with a B and C for each of G groups of channels.
        D: [D], of the input that y takes directly; None is 0.
        z: [B, T, D], output gates; None is no gate.
        delta_bias: [D], added to delta; None is 0.
        delta_softplus: take softplus of delta and its bias; if not, they have to be at least 0.
        initial_state: h before the first token [S, D, N], float32; zeros if None. S = B, or the
            number of packed sequences.
        output_final_state: return h after the last token too.
        cu_seqlens: offsets [S+1] of S sequences packed in B == 1, int32 or int64.
        parents: int32 or int64 [N], the earlier sequence at whose end each goes on, -1 for none: a
            row of prefix trees (PrefixTree).
        context: a slipstream.parallel.ContextParallel, with this rank's tokens, the states of all
            sequences and no cu_seqlens.
        impl: "eager", "triton" or "reference" to insist on one; chosen if None.

    All are of any floating dtype; they need not be of one.

    Returns:
        y [B, T, D] in u's dtype, and the final state [S, D, N], float32 (float64 for float64), or
        None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: 9 B T D N flops and B T D N exponentials; u, delta, z read and y written once; for
    backward a state each 64 tokens is kept.
    Source: Gu, Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023),
    algorithm 2. mamba_ssm has channels before tokens: slipstream.compat.mamba_ssm.
    """
    B, C = (x[:, :, None] if x.dim() == 3 else x for x in (B, C))
    tensors = inputs.ScanInputs(u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens)
    return op.run(tensors, delta_softplus, output_final_state, impl, context)


States = tuple[Tensor, Tensor, Tensor, Tensor]


@checks.operator
@trees.by_levels
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
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    chunk_size: int | None = None,
    impl: str | None = None,
) -> tuple[Tensor, States | None]:
    """Mamba-3, chunkwise: what a token writes is its own input and the one before it.

        theta_t = theta_{t-1} + angles_t;  q_t, k_t rotated by theta_t
        S_t = exp(g_t) (S_{t-1} + (1 - trap_t) dt_t sum_r k_{t-1,r} v_{t-1,r}^T)
              + trap_t dt_t sum_r k_{t,r} v_{t,r}^T
        o_{t,r} = scale * S_t^T q_{t,r}

    With R inputs and outputs a token it is the form called MIMO; SISO is R = 1. It is simple_gla
    whose tokens write the inputs before them, all that is ever written of these, and an output has
    what it reads of its own inputs added.

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

    Cost: that of chunk_simple_gla with (2 R - 1) T tokens, a gated scan of HV P channels, and a few
    passes over q, k and v. Angles add up in float32.
    Source: Mamba-3 (2026), as mamba_ssm 2.3 has it.
    """
    options = LinearOptions(scale, output_final_state, False, reverse, chunk_size, impl, context)
    given = _Given(q, k, v, g, dt, trap, angles)
    return _run(given, initial_state, cu_seqlens, options, recurrent=False)


@checks.operator
@trees.by_levels
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
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
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
    return _preprocess.in_time_order(
        trapezoid, tuple(given), states, cu_seqlens, context, reverse=options.reverse
    )


def _trapezoid(
    tensors: tuple[Tensor, ...],
    states: States | tuple[()],
    cu_seqlens: Tensor | None,
    options: LinearOptions,
    recurrent: bool,
) -> tuple[Tensor, States | None]:
    given = _Given(*_fp32.alike(*tensors))
    theta, last_theta = _angles(given, states, cu_seqlens, options)
    in_segments = partial(context_in_segments.of_segments, options.context)
    rotate = partial(rotate_qk, impl=options.impl)
    q, k, dots = in_segments(rotate, given.q, given.k, theta)
    previous = partial(_previous, cu_seqlens=cu_seqlens, options=options)
    S, key, value = states[:3] if states else (None, None, None)
    keys, key = previous(k, key)
    values, value = previous(given.v, value)
    own, other = (_fp32.widen(x) for x in (given.trap * given.dt, (1 - given.trap) * given.dt))
    own_before, last_own = previous(own, None)  # of a state it has been written
    weight = _fp32.widen(given.g).exp() * (own_before + other)
    values = in_segments(_weighted, values, weight)[0].to(k.dtype)
    o, S = _written(q, keys, values, given.g, S, cu_seqlens, options, recurrent)
    (dots,) = in_segments(_weighted, dots, own * _scale(options))
    if q.shape[3] == 1:
        o = torch.addcmul(o, dots.to(o.dtype), given.v.to(o.dtype))
    else:
        now = in_segments(lambda x, y: (product(x, _fp32.widen(y)),), dots, given.v)
        o = (_fp32.widen(o) + now[0]).to(o.dtype)
    if S is None or key is None or value is None or last_own is None or last_theta is None:
        return o, None
    S = S + last_own[..., None, None] * product(key.mT, value)
    return o, (S, key, value, last_theta)


def _weighted(x: Tensor, weights: Tensor) -> tuple[Tensor]:
    return (weights[..., None, None] * x,)


def _previous(
    x: Tensor, before: Tensor | None, cu_seqlens: Tensor | None, options: LinearOptions
) -> tuple[Tensor, Tensor | None]:
    """x [B, T, ...] of the token before each, and that of the last, float32 at least."""
    y, last = token_shift(
        x.flatten(2),
        initial_state=None if before is None else before.flatten(1).to(x.dtype),
        output_final_state=options.output_final_state,
        cu_seqlens=cu_seqlens,
        context=options.context,
        impl=dispatch.plain_impl(options.impl),
    )
    return y.view(x.shape), None if last is None else _fp32.widen(last).unflatten(1, x.shape[2:])


def _angles(
    given: _Given, states: States | tuple[()], cu_seqlens: Tensor | None, options: LinearOptions
) -> tuple[Tensor, Tensor | None]:
    """theta [B, T, HV, P], and after the last token [N, HV, P]."""
    angles = _fp32.widen(given.angles)
    theta, last = gated_scan(
        angles.flatten(2),
        torch.zeros_like(angles).flatten(2),
        _fp32.widen(states[3]).flatten(1) if states else None,
        options.output_final_state,
        False,
        cu_seqlens,
        _preprocess.scan_impl(options.impl),
        options.context,
    )
    last = None if last is None else last.unflatten(1, angles.shape[2:])
    return theta.view_as(angles), last


def _written(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    S: Tensor | None,
    cu_seqlens: Tensor | None,
    options: LinearOptions,
    recurrent: bool,
) -> tuple[Tensor, Tensor | None]:
    """The outputs for q after k and v of the tokens before are written: simple_gla of 2 R - 1
    tokens a token, of which the first decays, the first R write and the last R read."""
    T, R = q.shape[1], q.shape[3]
    n = 2 * R - 1
    q, k, v = (x.transpose(2, 3) for x in (q, k, v))
    if R > 1:  # after transpose: what torch.compile traces of a pad's gradient is contiguous
        q = F.pad(q, (0, 0, 0, 0, R - 1, 0))
        k, v = (F.pad(x, (0, 0, 0, 0, 0, R - 1)) for x in (k, v))
    q, k, v = (x.flatten(1, 2) for x in (q, k, v))
    g = F.pad(_fp32.widen(g)[:, :, None], (0, 0, 0, n - 1)).flatten(1, 2)
    context = None if options.context is None else options.context.repeated(n)
    offsets = None if cu_seqlens is None else cu_seqlens * n
    o, S = run(
        LinearInputs(q, k, v, g=g, initial_state=S, cu_seqlens=offsets),
        options._replace(scale=_scale(options), context=context),
        recurrent=recurrent,
    )
    return o.unflatten(1, (T, n))[:, :, R - 1 :].transpose(2, 3), S


def _scale(options: LinearOptions) -> float:
    return 1.0 if options.scale is None else options.scale


def _check(
    given: _Given, states: States | None, cu_seqlens: Tensor | None, options: LinearOptions
) -> None:
    q, k, v, g, dt, trap, angles = given
    S, key, value, theta = states or (None,) * 4
    _preprocess.expect_inputs(
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
