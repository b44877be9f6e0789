"""LightNet's attention: gated linear attention whose state stays a mean of what was written."""

from functools import partial

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.ops._fp32 import widen
from slipstream.ops._preprocess import expect_inputs, for_value_heads, in_time_order, scan_impl
from slipstream.ops._running_sums import Packing, nothing_yet, running_weights
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
        initial_state: before the first token, a tuple (S [N, HV, K, V], z [N, H, K]), float32; z
            is -inf where nothing is before, as if None.
        state_v_first: S is [N, HV, V, K] instead.
        the others: as chunk_gla.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final states, a tuple like initial_state, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
        NotImplementedError: reverse with a context.

    Cost: that of chunk_gla, and before it one pass over k, forward and backward, whose programs
    have 16 channels of a sequence each; across ranks and on a CPU log2(T) passes. States
    HV K V + H K floats.
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
    S, z = initial_state or (None, None)
    N = expect_inputs(
        cu_seqlens, context, q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"),
        **{
            "initial_state[0]": (S, "N HV V K" if options.state_v_first else "N HV K V"),
            "initial_state[1]": (z, "N H K"),
        },
    )  # fmt: skip
    z = nothing_yet(k.flatten(2), False, N) if z is None else widen(z).flatten(1)
    means = partial(_means, options=options._replace(reverse=False), recurrent=recurrent)
    return in_time_order(means, (q, k, v), (S, z), cu_seqlens, context, reverse=options.reverse)


def _means(
    tensors: tuple[Tensor, Tensor, Tensor],
    states: tuple[Tensor | None, Tensor],
    cu_seqlens: Tensor | None,
    options: LinearOptions,
    recurrent: bool,
) -> tuple[Tensor, States | None]:
    """tensors: q, k, v. states: S, and z [N, H K]."""
    (q, k, v), (S, z) = tensors, states
    scan = Packing(cu_seqlens, options.context, scan_impl(options.impl))
    keys, gate, z = running_weights(k.flatten(2), z, scan)
    (g,) = for_value_heads(v, gate.view(k.shape))
    keys = keys.view(k.shape)
    terms = LinearInputs(q, keys, v, g=g, initial_state=S, cu_seqlens=cu_seqlens)
    o, S = run(terms, options, recurrent=recurrent)
    return o, None if S is None else (S, z.unflatten(1, k.shape[2:]))
