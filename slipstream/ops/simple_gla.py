"""Linear attention with one decay a token and head: simple GLA, which is Mamba-2's SSD; and with a
constant one for each head (retention, of RetNet) or for each head and layer (lightning attention).
"""

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear import prefix_states
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.ops import _blocks, _fp32, _preprocess
from slipstream.runtime import context_parallel, trees


@checks.operator
@trees.as_context
@_blocks.by_blocks
def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    chunk_size: int | None = None,
    impl: str | None = None,
    consistent: bool = False,
    prefix_states: prefix_states.PrefixStates | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Simple GLA, chunkwise: a scalar decay for each token and head.

        S_t = exp(g_t) S_{t-1} + k_t v_t^T
        o_t = scale * S_t^T q_t

    Mamba-2's state space duality (SSD) is this with q = C, k = B, v = dt x and g = dt A.

    Args:
        q, k: queries and keys [B, T, H, K].
        v: values [B, T, HV, V], HV a multiple of H: head hv reads q, k of head hv // (HV // H).
        g: log decay [B, T, HV], at most 0, float32; none if None.
        g_gamma: one log decay [HV] for all tokens of a head, added to g; has a gradient too.
        scale: factor on the output; K^-0.5 if None.
        initial_state: state before the first token [N, HV, K, V], float32; zeros if None.
        output_final_state: return the state after the last token too.
        state_v_first: states are [N, HV, V, K] instead.
        reverse: run time backwards; the final state is then that before the first token.
        cu_seqlens: offsets [N+1] of N sequences packed in B == 1, int32 or int64.
        parents: int32 or int64 [N], the earlier sequence at whose end each goes on, -1 for none: a
            row of prefix trees (PrefixTree).
        context: a slipstream.parallel.ContextParallel, with this rank's tokens, the states of all
            sequences and no cu_seqlens. None: one rank has all tokens.
        chunk_size: a hint, tokens a chunk in plain torch, a power of two from 16 to 256; Triton's
            kernels have their own. Chosen if None.
        impl: None chooses; "sm90", "triton", "eager" or "reference" is used or refused.
        consistent: the same bits wherever a sequence is cut at a multiple of 64 tokens, with or
            without gradients, and whatever else there is in the batch. In plain torch slow: it goes
            64 tokens of one sequence at a time. Not with reverse or context.
        prefix_states: states to leave on the way, for requests with the same prefix: a PrefixStates
            lists multiples of 64 tokens and rows of a pool. Not with gradients, reverse or context.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V], float32, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: for chunks of C, 2 T HV (2 K V + C (K + V) / 2) flops; state HV K V floats.
    Source: Dao, Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through
    Structured State Space Duality" (2024).
    """
    terms = LinearInputs(q, k, v, g=g, initial_state=initial_state, cu_seqlens=cu_seqlens)
    options = scale, output_final_state, state_v_first, reverse, chunk_size, impl
    options = LinearOptions(*options, context, consistent, prefix_states)
    return _run(terms, g_gamma, options, recurrent=False)


@checks.operator
@trees.as_context
def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Simple GLA, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_simple_gla. Cost: 4 T HV K V flops, one after the other.
    """
    terms = LinearInputs(q, k, v, g=g, initial_state=initial_state, cu_seqlens=cu_seqlens)
    options = LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context)
    return _run(terms, g_gamma, options, recurrent=True)


def _run(
    terms: LinearInputs, g_gamma: Tensor | None, options: LinearOptions, *, recurrent: bool
) -> tuple[Tensor, Tensor | None]:
    return run(terms._replace(g=_decay(terms.v, terms.g, g_gamma)), options, recurrent=recurrent)


def _decay(v: Tensor, g: Tensor | None, g_gamma: Tensor | None) -> Tensor | None:
    if g is not None:
        checks.expect_rank("g", g, 3, "[B, T, HV]")
    if g_gamma is None:
        return g
    checks.expect_rank("v", v, 4, "[B, T, HV, V]")
    checks.expect_shape("g_gamma", g_gamma, v.shape[2:3])
    checks.expect_floating({"g_gamma": g_gamma})
    if g is None:
        return g_gamma.expand(v.shape[:3])
    checks.expect_shape("g", g, v.shape[:3])
    return _fp32.widen(g) + g_gamma


@checks.operator
@trees.as_context
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
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
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
    terms = LinearInputs(q, k, v, initial_state=initial_state, cu_seqlens=cu_seqlens)
    options = LinearOptions(
        scale, output_final_state, state_v_first, reverse, chunk_size, impl, context
    )
    return _run(terms, _preprocess.per_head(v, log_decay), options, recurrent=False)


@checks.operator
@trees.as_context
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
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Retention (RetNet), token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_retention. Cost: 4 T HV K V flops, one after the other.
    """
    terms = LinearInputs(q, k, v, initial_state=initial_state, cu_seqlens=cu_seqlens)
    options = LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context)
    return _run(terms, _preprocess.per_head(v, log_decay), options, recurrent=True)


def log_decay(h: Tensor, first: int = 0) -> Tensor:
    """log(1 - 2^(-5-h)); 1 - 2^(-5-h) itself is 1 in float32 from head 20 on.

    first: the number of the first of h, where h are not all heads.
    """
    return torch.log1p(-torch.exp2(-5 - h - first))


@checks.operator
@trees.as_context
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
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
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
    terms = LinearInputs(q, k, v, initial_state=initial_state, cu_seqlens=cu_seqlens)
    options = LinearOptions(
        scale, output_final_state, state_v_first, reverse, chunk_size, impl, context
    )
    return _run(terms, _lightning_decay(v, layer_idx, num_layers), options, recurrent=False)


@checks.operator
@trees.as_context
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
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_lightning_attn. Cost: 4 T HV K V flops, one after the
    other.
    """
    terms = LinearInputs(q, k, v, initial_state=initial_state, cu_seqlens=cu_seqlens)
    options = LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context)
    return _run(terms, _lightning_decay(v, layer_idx, num_layers), options, recurrent=True)


def _lightning_decay(v: Tensor, layer_idx: int, num_layers: int) -> Tensor:
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
