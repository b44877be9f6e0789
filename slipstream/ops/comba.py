"""Comba: a decay and, under a key of its own, an erase of what the state held before it."""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.ops._preprocess import beta_or_ones, l2_normalised
from slipstream.runtime.context_parallel import ContextParallel


@checks.operator
def chunk_comba(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor,
    beta: Tensor | None = None,
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
    """Comba, chunkwise: a decay, and an erase of what the state holds under the auxiliary key p.

        S_t = (exp(g_t) I - beta_t k_t p_t^T) S_{t-1} + beta_t k_t v_t^T
        o_t = scale * S_t^T q_t

    What is erased is read before the decay, not after it as in chunk_gated_delta_rule. The paper
    has p = b k, with b a number for each head, and reads the state under q - d k.

    Arguments have to be named: orders with p before v and after it are both in use, and mixing
    them up goes unnoticed.

    Args:
        q, k: queries and keys [B, T, H, K]; keys of norm 1 keep the recurrence stable.
        v: values [B, T, HV, V], HV a multiple of H: head hv reads q, k, p of head
            hv // (HV // H).
        p: auxiliary keys [B, T, H, K]; k if None.
        g: log decay [B, T, HV], at most 0, float32.
        beta: how much of the old value to replace [B, T, HV], in (0, 1), or (0, 2); 1 if None.
        scale: factor on the output; K^-0.5 if None.
        initial_state: state before the first token [N, HV, K, V], float32; zeros if None.
        output_final_state: return the state after the last token too.
        use_qk_l2norm_in_kernel: normalise q, k and p to norm 1 first.
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
    Source: Hu and others, "Comba: Improving Bilinear RNNs with Closed-loop Control" (2025), the
    scalar plus low rank form.
    """
    return run(
        _terms(q, k, v, p, g, beta, use_qk_l2norm_in_kernel, initial_state, cu_seqlens, impl),
        LinearOptions(scale, output_final_state, state_v_first, reverse, chunk_size, impl, context),
        recurrent=False,
    )


@checks.operator
def fused_recurrent_comba(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor,
    beta: Tensor | None = None,
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
    """Comba, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_comba. Cost: 7 T HV K V flops, one after the other.
    """
    return run(
        _terms(q, k, v, p, g, beta, use_qk_l2norm_in_kernel, initial_state, cu_seqlens, impl),
        LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context),
        recurrent=True,
    )


def _terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor,
    beta: Tensor | None,
    l2_norm: bool,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    impl: str | None,
) -> LinearInputs:
    checks.expect_rank("v", v, 4, "[B, T, HV, V]")
    checks.expect_rank("g", g, 3, "[B, T, HV]")
    beta = beta_or_ones(beta, v)
    checks.expect_rank("beta", beta, 3, "[B, T, HV]")
    if l2_norm:
        q, k = l2_normalised(impl, q=q, k=k)
    if p is None:
        p = k
    elif l2_norm:
        (p,) = l2_normalised(impl, p=p)
    return LinearInputs(
        q, k, v, g=g, beta=beta, p=p, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
