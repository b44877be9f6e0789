"""Gated linear attention (GLA): a decay for every channel of the key.

HGRN: a gated recurrence of every channel on its own.
"""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.gated_scan import op as gated_scan
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.prefix_states import PrefixStates
from slipstream.ops._blocks import by_blocks
from slipstream.runtime import context_parallel, trees


@checks.operator
@trees.as_context
@by_blocks
def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    gv: Tensor | None = None,
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
    prefix_states: PrefixStates | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated linear attention, chunkwise: each row of the state decays at its own rate.

        S_t = diag(exp(g_t)) S_{t-1} diag(exp(gv_t)) + k_t v_t^T
        o_t = scale * S_t^T q_t

    Args:
        q, k: queries and keys [B, T, H, K].
        v: values [B, T, HV, V], HV a multiple of H: head hv reads q, k of head hv // (HV // H).
        g: log decay of the rows of the state [B, T, HV, K], at most 0, float32.
        gv: log decay of its columns [B, T, HV, V]; none if None.
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
    Source: Yang and others, "Gated Linear Attention Transformers with Hardware-Efficient
    Training" (2023).
    """
    checks.expect_rank("g", g, 4, "[B, T, HV, K]")
    options = scale, output_final_state, state_v_first, reverse, chunk_size, impl
    return run(
        LinearInputs(q, k, v, g=g, gv=gv, initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(*options, context, consistent, prefix_states),
        recurrent=False,
    )


@checks.operator
@trees.as_context
def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
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
    """Gated linear attention, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_gla, except for the gates, which may both be absent:

    Args:
        gk: log decay of the rows of the state [B, T, HV, K], chunk_gla's g; none if None.
        gv: log decay of its columns [B, T, HV, V]; none if None.

    Cost: 4 T HV K V flops, one after the other.
    """
    if gk is not None:
        checks.expect_rank("gk", gk, 4, "[B, T, HV, K]")
    return run(
        LinearInputs(q, k, v, g=gk, gv=gv, initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context),
        recurrent=True,
        names={"g": "gk"},
    )


@checks.operator
@trees.by_levels
def chunk_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated scan over time: the recurrence of HGRN, elementwise.

        h_t = exp(g_t) h_{t-1} + x_t

    Args:
        x: inputs [B, T, D], any floating dtype; HGRN's are (1 - exp(g)) silu(i).
        g: log decays [B, T, D], at most 0, any floating dtype.
        initial_state: h before the first token [N, D], float32; zeros if None.
        output_final_state: return h after the last token too.
        reverse: run time backwards; the final state is then that before the first token.
        cu_seqlens: offsets [N+1] of N sequences packed in B == 1, int32 or int64.
        parents: int32 or int64 [N], the earlier sequence at whose end each goes on, -1 for none: a
            row of prefix trees (PrefixTree).
        context: a slipstream.parallel.ContextParallel, with this rank's tokens, the states of all
            sequences and no cu_seqlens. None: one rank has all tokens.
        impl: "eager", "triton" or "reference" to insist on one; chosen if None.

    Returns:
        h [B, T, D] in x's dtype, and the final state [N, D], float32 (float64 for float64), or
        None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: 4 B T D flops, x and g read and h written once; state D floats.
    Source: Qin, Yang, Zhong, "Hierarchically Gated Recurrent Neural Network for Sequence
    Modeling" (2023).
    """
    return gated_scan.run(
        x, g, initial_state, output_final_state, reverse, cu_seqlens, impl, context
    )


@checks.operator
@trees.by_levels
def fused_recurrent_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes chunk_hgrn: both names are in use."""
    return gated_scan.run(
        x, g, initial_state, output_final_state, reverse, cu_seqlens, impl, context
    )
