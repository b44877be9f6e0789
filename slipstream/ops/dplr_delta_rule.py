"""The generalised delta rule: a transition of diagonal plus low rank (DPLR)."""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.runtime import context_parallel, trees


@checks.operator
@trees.as_context
def chunk_dplr_delta_rule(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    chunk_size: int | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Generalised delta rule, chunkwise: the transition is diagonal plus any rank-one matrix.

        S_t = (diag(exp(gk_t)) + b_t a_t^T) S_{t-1} + k_t v_t^T
        o_t = scale * S_t^T q_t

    Arguments have to be named: six tensors of much the same shape are too many to order.

    Args:
        q, k: queries and keys [B, T, H, K].
        v: values [B, T, HV, V], HV a multiple of H: head hv reads q, k, a, b of head
            hv // (HV // H).
        a: what the transition reads [B, T, H, K], of the state before its decay.
        b: where it adds what it read [B, T, H, K].
        gk: log decay of the rows of the state [B, T, HV, K], at most 0, float32.
        scale: factor on the output; K^-0.5 if None.
        initial_state: state before the first token [N, HV, K, V], float32; zeros if None.
        output_final_state: return the state after the last token too.
        safe_gate, lower_bound: promises that gk stays near 0, or above lower_bound < 0. Kernels
            may use them to go faster; the result is the same with and without.
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

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V], float32, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: for chunks of C, about 2 T HV (4 K V + 2 C (K + V)) flops; state HV K V floats.
    Source: Peng and others, "RWKV-7 Goose with Expressive Dynamic State Evolution" (2025).
    """
    checks.expect_lower_bound(lower_bound)
    checks.expect_rank("gk", gk, 4, "[B, T, HV, K]")
    return run(
        LinearInputs(q, k, v, g=gk, a=a, b=b, initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(scale, output_final_state, state_v_first, reverse, chunk_size, impl, context),
        recurrent=False,
        names={"g": "gk"},
    )


@checks.operator
@trees.as_context
def fused_recurrent_dplr_delta_rule(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
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
    """Generalised delta rule, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_dplr_delta_rule. Cost: 9 T HV K V flops, one after the
    other.
    """
    checks.expect_rank("gk", gk, 4, "[B, T, HV, K]")
    return run(
        LinearInputs(q, k, v, g=gk, a=a, b=b, initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context),
        recurrent=True,
        names={"g": "gk"},
    )
