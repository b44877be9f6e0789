"""RWKV-4's time mixing: of each channel a decayed mean of values, weighted by exp(k)."""

from functools import partial

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.ops._fp32 import alike, widen
from slipstream.ops._preprocess import expect_inputs, in_time_order
from slipstream.ops._running_sums import Packing, running_mean
from slipstream.runtime.context_parallel import ContextParallel

States = tuple[Tensor, Tensor]


@checks.operator
def chunk_rwkv4(
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, States | None]:
    """RWKV-4's weighted mean of the values so far, elementwise.

        Z_t = exp(w) Z_{t-1} + exp(k_t);  M_t = (exp(w) Z_{t-1} M_{t-1} + exp(k_t) v_t) / Z_t
        o_t = (Z_{t-1} M_{t-1} + exp(u + k_t) v_t) / (Z_{t-1} + exp(u + k_t))

    A running maximum keeps every exponent near 0 or below it.

    Args:
        w: log decay of each channel [D], at most 0: -exp(time_decay) of RWKV's checkpoints.
        u: bonus of the current token [D].
        k: logarithms of weights [B, T, D].
        v: values [B, T, D].
        initial_state: before the first token, a tuple (M, log Z), each [N, D], float32; log Z is
            -inf where nothing is before, as if None.
        the others: as chunk_hgrn.

    Returns:
        o [B, T, D] in v's dtype, and the final state, a tuple like initial_state, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
        NotImplementedError: reverse with a context.

    Cost: on CUDA one pass over k and v, forward and backward, whose programs have 16 channels of a
    sequence each; across ranks and on a CPU a gated scan of 2 D channels and log2(T) passes for a
    maximum. State 2 D floats.
    Source: Peng and others, "RWKV: Reinventing RNNs for the Transformer Era" (2023), equations 16
    and 22 to 25.
    """
    if context is not None and torch.compiler.is_compiling():
        return context.eagerly(
            chunk_rwkv4, w, u, k, v, initial_state=initial_state, reverse=reverse,
            output_final_state=output_final_state, cu_seqlens=cu_seqlens, context=context,
            impl=impl,
        )  # fmt: skip
    M, z = initial_state or (None, None)
    N = expect_inputs(
        cu_seqlens, context, k=(k, "B T D"), v=(v, "B T D"), w=(w, "D"), u=(u, "D"),
        **{"initial_state[0]": (M, "N D"), "initial_state[1]": (z, "N D")},
    )  # fmt: skip
    w, u, k, v = alike(w, u, k, v)
    if M is None or z is None:
        z = widen(k).new_full((N, k.shape[2]), -torch.inf)
        start = torch.cat([torch.zeros_like(z), z], -1)
    else:  # a mean of nothing counts for nothing, whatever it is
        M, z = widen(M), widen(z)
        start = torch.cat([torch.where(z == -torch.inf, 0, M), z], -1)
    mixed = partial(_mixed, w=widen(w), u=widen(u), context=context, impl=impl)
    o, final = in_time_order(mixed, (k, v), (start,), cu_seqlens, context, reverse=reverse)
    # slices, which unlike the results of chunk may be changed in place
    D = k.shape[-1]
    return o, (final[0][..., :D], final[0][..., D:]) if output_final_state else None


def _mixed(
    tensors: tuple[Tensor, Tensor],
    states: tuple[Tensor],
    cu_seqlens: Tensor | None,
    w: Tensor,
    u: Tensor,
    context: ContextParallel | None,
    impl: str | None,
) -> tuple[Tensor, tuple[Tensor]]:
    """tensors: k, v. states: M and log Z before the first token of each sequence, [N, 2 D]."""
    o, final = running_mean(*tensors, w, u, *states, Packing(cu_seqlens, context, impl))
    return o, (final,)


@checks.operator
def fused_recurrent_rwkv4(
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, States | None]:
    """Computes chunk_rwkv4: fla has this name."""
    return chunk_rwkv4(
        w, u, k, v, initial_state=initial_state, output_final_state=output_final_state,
        reverse=reverse, cu_seqlens=cu_seqlens, context=context, impl=impl,
    )  # fmt: skip
