"""Lightning attention: linear attention with a constant decay for each head and layer."""

from torch import Tensor

from slipstream.common import checks
from slipstream.ops import _preprocess, simple_gla
from slipstream.runtime.context_parallel import ContextParallel


@checks.operator
def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
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
    """Lightning attention, chunkwise: a constant decay for each head and layer.

        S_t = gamma_h S_{t-1} + k_t v_t^T
        gamma_h = exp(-(8 / HV) (1 - layer_idx / num_layers) h)
        o_t = scale * S_t^T q_t

    for the heads h = 0 .. HV - 1 of v.

    Args:
        q, k: queries and keys [B, T, H, K].
        v: values [B, T, HV, V], HV a multiple of H: head hv reads q, k of head hv // (HV // H).
        layer_idx: which layer this is, from 0; later layers decay more slowly.
        num_layers: of the model.
        the others: as chunk_simple_gla.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V], float32, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: for chunks of C, 2 T HV (2 K V + C (K + V) / 2) flops; state HV K V floats.
    Source: Qin and others, "Lightning Attention-2: A Free Lunch for Handling Unlimited Sequence
    Lengths in Large Language Models" (2024).
    """
    return simple_gla.chunk_simple_gla(
        q,
        k,
        v,
        g_gamma=_decay(v, layer_idx, num_layers),
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
def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
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
    """Lightning attention, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_lightning_attn. Cost: 4 T HV K V flops, one after the
    other.
    """
    return simple_gla.fused_recurrent_simple_gla(
        q,
        k,
        v,
        g_gamma=_decay(v, layer_idx, num_layers),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        context=context,
        impl=impl,
    )


def _decay(v: Tensor, layer_idx: int, num_layers: int) -> Tensor:
    if num_layers < 1:
        raise ValueError(f"num_layers: want at least 1, got {num_layers}")
    if not 0 <= layer_idx <= num_layers:
        raise ValueError(f"layer_idx: want from 0 to num_layers = {num_layers}, got {layer_idx}")
    return _preprocess.per_head(v, decay_of_heads, 1 - layer_idx / num_layers)


def decay_of_heads(h: Tensor, share: float, first: int = 0, heads: int | None = None) -> Tensor:
    """-(8 / HV) (1 - layer_idx / num_layers) h, of which share is the second factor.

    first, heads: the number of the first of h, and HV, where h are not all heads.
    """
    return -8 * share / max(heads or len(h), 1) * (h + first)
