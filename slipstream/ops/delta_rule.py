"""The delta rule (DeltaNet); with a decay (Gated DeltaNet, GDN); with a decay and an erase under a
key of its own (Comba).
"""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.prefix_states import PrefixStates
from slipstream.ops import _blocks, _preprocess
from slipstream.runtime import context_parallel, trees


@checks.operator
@trees.as_context
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
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
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

    Cost: for chunks of C, 2 T HV (3 K V + C (3 K + 2 V) / 2) flops; state HV K V floats.
    Source: Yang and others, "Parallelizing Linear Transformers with the Delta Rule over Sequence
    Length" (2024).
    """
    checks.expect_rank("beta", beta, 3, "[B, T, HV]")
    if use_qk_l2norm_in_kernel:
        q, k = _preprocess.l2_normalised(impl, q=q, k=k)
    return run(
        LinearInputs(q, k, v, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(scale, output_final_state, state_v_first, reverse, chunk_size, impl, context),
        recurrent=False,
    )


@checks.operator
@trees.as_context
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
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Delta rule, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_delta_rule, except for beta.

    Args:
        beta: [B, T, HV], or [B, T, HV, V] for each column of the state; 1 if None.

    Cost: 6 T HV K V flops, one after the other.
    """
    if use_qk_l2norm_in_kernel:
        q, k = _preprocess.l2_normalised(impl, q=q, k=k)
    beta = _preprocess.beta_or_ones(beta, v)
    return run(
        LinearInputs(q, k, v, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context),
        recurrent=True,
    )


@checks.operator
@trees.as_context
@_blocks.by_blocks
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
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
    """Gated delta rule, chunkwise: decay the state, then correct what it holds under the key.

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
        o_t = scale * S_t^T q_t

    Args:
        q, k: queries and keys [B, T, H, K]; keys of norm 1 keep the recurrence stable.
        v: values [B, T, HV, V], HV a multiple of H: head hv reads q, k of head hv // (HV // H).
        g: log decay [B, T, HV], at most 0, float32.
        beta: how much of the old value to replace [B, T, HV], in (0, 1), or (0, 2).
        scale: factor on the output; K^-0.5 if None.
        initial_state: state before the first token [N, HV, K, V], float32; zeros if None.
        output_final_state: return the state after the last token too.
        use_qk_l2norm_in_kernel: normalise q and k to norm 1 first.
        use_gate_in_kernel: g is raw: the decay is -exp(A_log) softplus(g + dt_bias).
        A_log, dt_bias: [HV], for use_gate_in_kernel; dt_bias may be None.
        use_beta_sigmoid_in_kernel: beta is raw: sigmoid(beta) is used, rounded to beta's dtype.
        allow_neg_eigval: 2 sigmoid(beta), so that the transition has eigenvalues down to -1.
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

    Cost: for chunks of C, 2 T HV (3 K V + C (3 K + 2 V) / 2) flops; state HV K V floats.
    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024), equation 10.
    """
    checks.expect_rank("g", g, 3, "[B, T, HV]")
    checks.expect_rank("beta", beta, 3, "[B, T, HV]")
    if use_qk_l2norm_in_kernel:
        q, k = _preprocess.l2_normalised(impl, q=q, k=k)
    if use_gate_in_kernel:
        g = _preprocess.delta_gate(g, A_log, dt_bias, impl=impl)
    if use_beta_sigmoid_in_kernel or allow_neg_eigval:
        beta = _preprocess.beta_sigmoid(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    options = scale, output_final_state, state_v_first, reverse, chunk_size, impl
    return run(
        LinearInputs(q, k, v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(*options, context, consistent, prefix_states),
        recurrent=False,
    )


@checks.operator
@trees.as_context
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_gated_delta_rule, and besides:

        S_t = D_t S_{t-1} exp(gv_t) + k_t (beta_t (v_t - (D_t S_{t-1} exp(gv_t))^T k_t))^T

    with D_t = exp(g_t) diag(exp(gk_t)).

    Args:
        g: log decay [B, T, HV], or None.
        gk: log decay of the rows of the state [B, T, HV, K], or None.
        gv: log decay of its columns [B, T, HV, V], or None.
        beta: [B, T, HV], or [B, T, HV, V] for each column; 1 if None.

    Cost: 8 T HV K V flops, one after the other.
    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024), equation 10.
    """
    checks.expect_rank("q", q, 4, "[B, T, H, K]")
    checks.expect_rank("v", v, 4, "[B, T, HV, V]")
    if g is not None:
        checks.expect_shape("g", g, v.shape[:3])
    if use_qk_l2norm_in_kernel:
        q, k = _preprocess.l2_normalised(impl, q=q, k=k)
    if use_gate_in_kernel:
        if g is None:
            raise ValueError("g: want a tensor [B, T, HV] with use_gate_in_kernel, got None")
        g = _preprocess.delta_gate(g, A_log, dt_bias, impl=impl)
    if gk is not None:
        checks.expect_shape("gk", gk, (*v.shape[:3], q.shape[-1]))
        checks.expect_floating({"g": g, "gk": gk})
        checks.expect_one_device({"q": q, "g": g, "gk": gk})
        g = gk if g is None else g[..., None] + gk
    beta = _preprocess.beta_or_ones(beta, v)
    if use_beta_sigmoid_in_kernel or allow_neg_eigval:
        beta = _preprocess.beta_sigmoid(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return run(
        LinearInputs(
            q, k, v, g=g, gv=gv, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens
        ),
        LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context),
        recurrent=True,
    )


@checks.operator
@trees.as_context
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
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
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

    Cost: for chunks of C, 2 T HV (3 K V + C (3 K + 2 V) / 2) flops; state HV K V floats.
    Source: Hu and others, "Comba: Improving Bilinear RNNs with Closed-loop Control" (2025), the
    scalar plus low rank form.
    """
    return run(
        _comba_terms(q, k, v, p, g, beta, use_qk_l2norm_in_kernel, initial_state, cu_seqlens, impl),
        LinearOptions(scale, output_final_state, state_v_first, reverse, chunk_size, impl, context),
        recurrent=False,
    )


@checks.operator
@trees.as_context
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
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Comba, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_comba. Cost: 7 T HV K V flops, one after the other.
    """
    return run(
        _comba_terms(q, k, v, p, g, beta, use_qk_l2norm_in_kernel, initial_state, cu_seqlens, impl),
        LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context),
        recurrent=True,
    )


def _comba_terms(
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
    beta = _preprocess.beta_or_ones(beta, v)
    checks.expect_rank("beta", beta, 3, "[B, T, HV]")
    if l2_norm:
        q, k = _preprocess.l2_normalised(impl, q=q, k=k)
    if p is None:
        p = k
    elif l2_norm:
        (p,) = _preprocess.l2_normalised(impl, p=p)
    return LinearInputs(
        q, k, v, g=g, beta=beta, p=p, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
