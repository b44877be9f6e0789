"""Retention (RetNet): linear attention with a constant decay for each head."""

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.ops import _preprocess, simple_gla
from slipstream.runtime.context_parallel import ContextParallel


@checks.operator
def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    chunk_size: int | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Retention (RetNet), chunkwise: a constant decay for each head.

        S_t = gamma_h S_{t-1} + k_t v_t^T          gamma_h = 1 - 2^(-5-h)
        o_t = scale * S_t^T q_t

    for the heads h = 0 .. HV - 1 of v.

    Args:
        q, k: queries and keys [B, T, H, K].
        v: values [B, T, HV, V], HV a multiple of H: head hv reads q, k of head hv // (HV // H).
        the others: as chunk_simple_gla.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V], float32, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: for chunks of C, 2 T HV (2 K V + C (K + V) / 2) flops; state HV K V floats.
    Source: Sun and others, "Retentive Network: A Successor to Transformer for Large Language
    Models" (2023).
    """
    return simple_gla.chunk_simple_gla(
        q,
        k,
        v,
        g_gamma=_preprocess.per_head(v, log_decay),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        context=context,
        chunk_size=chunk_size,
        impl=impl,
    )


@checks.operator
def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Retention (RetNet), token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_retention. Cost: 4 T HV K V flops, one after the other.
    """
    return simple_gla.fused_recurrent_simple_gla(
        q,
        k,
        v,
        g_gamma=_preprocess.per_head(v, log_decay),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        context=context,
        impl=impl,
    )


def log_decay(h: Tensor, first: int = 0) -> Tensor:
    """log(1 - 2^(-5-h)); 1 - 2^(-5-h) itself is 1 in float32 from head 20 on.

    first: the number of the first of h, where h are not all heads.
    """
    return torch.log1p(-torch.exp2(-5 - h - first))
