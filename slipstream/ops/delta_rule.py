"""The delta rule (DeltaNet)."""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.ops._preprocess import beta_or_ones, l2_normalised
from slipstream.runtime.context_parallel import ContextParallel


@checks.operator
def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    chunk_size: int | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Delta rule, chunkwise: correct what the state holds under the key.

        S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
        o_t = scale * S_t^T q_t

    Args:
        q, k: queries and keys [B, T, H, K]; keys of norm 1 keep the recurrence stable.
        v: values [B, T, HV, V], HV a multiple of H: head hv reads q, k of head hv // (HV // H).
        beta: how much of the old value to replace [B, T, HV], in (0, 1), or (0, 2).
        scale: factor on the output; K^-0.5 if None.
        initial_state: state before the first token [N, HV, K, V], float32; zeros if None.
        output_final_state: return the state after the last token too.
        use_qk_l2norm_in_kernel: normalise q and k to norm 1 first.
        state_v_first: states are [N, HV, V, K] instead.
        reverse: run time backwards; the final state is then that before the first token.
        cu_seqlens: offsets [N+1] of N sequences packed in B == 1, int32 or int64.
        context: a slipstream.parallel.ContextParallel, with this rank's tokens, the states of all
            sequences and no cu_seqlens. None: one rank has all tokens.
        chunk_size: a hint, tokens a chunk in plain torch, a power of two from 16 to 256; Triton's
            kernels have their own. Chosen if None.
        impl: None chooses; "sm90", "triton", "eager" or "reference" is used or refused.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V], float32, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: for chunks of C, 2 T HV (3 K V + C (3 K + 2 V) / 2) flops; state HV K V floats.
    Source: Yang and others, "Parallelizing Linear Transformers with the Delta Rule over Sequence
    Length" (2024).
    """
    checks.expect_rank("beta", beta, 3, "[B, T, HV]")
    if use_qk_l2norm_in_kernel:
        q, k = l2_normalised(impl, q=q, k=k)
    return run(
        LinearInputs(q, k, v, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(scale, output_final_state, state_v_first, reverse, chunk_size, impl, context),
        recurrent=False,
    )


@checks.operator
def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Delta rule, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_delta_rule, except for beta.

    Args:
        beta: [B, T, HV], or [B, T, HV, V] for each column of the state; 1 if None.

    Cost: 6 T HV K V flops, one after the other.
    """
    if use_qk_l2norm_in_kernel:
        q, k = l2_normalised(impl, q=q, k=k)
    beta = beta_or_ones(beta, v)
    return run(
        LinearInputs(q, k, v, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context),
        recurrent=True,
    )
