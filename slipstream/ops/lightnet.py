"""LightNet's attention: gated linear attention whose state stays a mean of what was written."""

from typing import cast

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.ops._fp32 import widen
from slipstream.ops._running_sums import Packing, nothing_yet, running_sums, time_turned
from slipstream.ops.rwkv4 import sequences
from slipstream.runtime.context_parallel import ContextParallel

States = tuple[Tensor, Tensor]


@checks.operator
def chunk_lightnet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    chunk_size: int | None = None,
    impl: str | None = None,
) -> tuple[Tensor, States | None]:
    """LightNet's attention, chunkwise: each row of the state is a mean weighted by exp(k).

        z_t = log(exp(z_{t-1}) + exp(k_t))
        S_t = diag(exp(z_{t-1} - z_t)) S_{t-1} + exp(k_t - z_t) v_t^T
        o_t = scale * S_t^T q_t

    Args:
        q: queries [B, T, H, K].
        k: logarithms of the keys' weights [B, T, H, K].
        v: values [B, T, HV, V], HV a multiple of H: head hv reads q, k of head hv // (HV // H).
        scale: factor on the output; K^-0.5 if None.
        initial_state: before the first token, a tuple (S [N, HV, K, V], z [N, H, K]), float32; z
            is -inf where nothing is before, as if None.
        output_final_state: return the states after the last token too.
        state_v_first: S is [N, HV, V, K] instead.
        reverse: run time backwards; the final states are then those before the first token.
        cu_seqlens: offsets [N+1] of N sequences packed in B == 1, int32 or int64.
        context: a slipstream.parallel.ContextParallel, with this rank's tokens, the states of all
            sequences and no cu_seqlens. None: one rank has all tokens.
        chunk_size: a hint, tokens a chunk in plain torch, a power of two from 16 to 256; Triton's
            kernels have their own. Chosen if None.
        impl: None chooses; "sm90", "triton", "eager" or "reference" is used or refused.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final states, a tuple like initial_state, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
        NotImplementedError: reverse with a context.

    Cost: that of chunk_gla, and before it a gated scan of H K channels, log2(T) passes over
    B T H K floats for a maximum, and some more of them. States HV K V + H K floats.
    Source: Qin and others, "You Only Scan Once: Efficient Multi-dimension Sequential Modeling with
    LightNet" (2024), section 3.
    """
    options = LinearOptions(
        scale, output_final_state, state_v_first, reverse, chunk_size, impl, context
    )
    return _run(q, k, v, initial_state, cu_seqlens, options, recurrent=False)


@checks.operator
def fused_recurrent_lightnet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, States | None]:
    """LightNet's attention, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_lightnet. Cost: 5 T HV K V flops, one after the other.
    """
    options = LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context)
    return _run(q, k, v, initial_state, cu_seqlens, options, recurrent=True)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: States | None,
    cu_seqlens: Tensor | None,
    options: LinearOptions,
    *,
    recurrent: bool,
) -> tuple[Tensor, States | None]:
    context = options.context
    if context is not None and torch.compiler.is_compiling():
        return context.eagerly(
            _run, q, k, v, initial_state, cu_seqlens, options, recurrent=recurrent
        )
    S, start = _checked(q, k, v, initial_state, cu_seqlens, options)
    H, K, HV = *k.shape[2:], v.shape[2]
    if options.reverse:
        (q, k, v), cu_seqlens = time_turned((q, k, v), cu_seqlens)
        if cu_seqlens is not None:
            start, S = start.flip(0), None if S is None else S.flip(0)
    scan = Packing(cu_seqlens, context, "triton" if options.impl == "sm90" else options.impl)
    logs = widen(k).flatten(2)
    after, before, last = running_sums(logs, None, None, start, scan)
    # 0 where nothing is before, whose state is 0
    gate = torch.where(before == -torch.inf, 0, before - after).unflatten(2, (H, K))
    g = gate if HV == H else gate.repeat_interleave(HV // H, dim=2)
    keys = (logs - after).exp().to(k.dtype).unflatten(2, (H, K))
    terms = LinearInputs(q, keys, v, g=g, initial_state=S, cu_seqlens=cu_seqlens)
    o, S = run(terms, options._replace(reverse=False), recurrent=recurrent)
    if options.reverse:
        o = o.flip(1)
        if cu_seqlens is not None:
            last, S = last.flip(0), None if S is None else S.flip(0)
    return o, None if S is None else (S, last.unflatten(1, (H, K)))


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: States | None,
    cu_seqlens: Tensor | None,
    options: LinearOptions,
) -> tuple[Tensor | None, Tensor]:
    """S, and z before the first token of each sequence [N, H K]."""
    checks.expect_layouts(q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"))
    given = {"q": q, "k": k, "v": v}
    N = sequences(k, cu_seqlens, options.reverse, options.context)
    (H, K), (HV, V) = k.shape[2:], v.shape[2:]
    checks.expect_multiple("HV", HV, "H", H)
    if initial_state is not None:
        if not isinstance(initial_state, tuple) or len(initial_state) != 2:
            raise TypeError(
                "initial_state: want a tuple (S [N, HV, K, V], z [N, H, K]), "
                f"got {type(initial_state).__name__}"
            )
        size = (V, K) if options.state_v_first else (K, V)
        for i, (state, shape) in enumerate(zip(initial_state, ((N, HV, *size), (N, H, K)))):
            checks.expect_shape(f"initial_state[{i}]", state, shape)
            given[f"initial_state[{i}]"] = state
    checks.expect_floating(given)
    checks.expect_one_device({**given, "cu_seqlens": cu_seqlens})
    if initial_state is None:
        return None, nothing_yet(k.flatten(2), False, N)
    return initial_state[0], widen(cast(States, initial_state)[1]).flatten(1)
