"""Kimi delta attention (KDA): the gated delta rule with a decay for every channel of the key; and
Gated DeltaNet-2, whose erase and write are gates of channels too.
"""

from functools import partial

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.elementwise.erase import erase
from slipstream.kernels.linear import channel_gates, inputs, prefix_states
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.ops import _blocks, _preprocess
from slipstream.runtime import context_parallel, trees


@checks.operator
@trees.as_context
@_blocks.by_blocks
def chunk_kda(
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
    safe_gate: bool = False,
    lower_bound: float | None = None,
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
    """Kimi delta attention, chunkwise: decay each channel, then correct what lies under the key.

        S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T
        o_t = scale * S_t^T q_t

    Args:
        q, k: queries and keys [B, T, H, K]; keys of norm 1 keep the recurrence stable.
        v: values [B, T, HV, V], HV a multiple of H: head hv reads q, k of head hv // (HV // H).
        g: log decay [B, T, HV, K], at most 0, float32.
        beta: how much of the old value to replace [B, T, HV], in (0, 1), or (0, 2).
        scale: factor on the output; K^-0.5 if None.
        initial_state: state before the first token [N, HV, K, V], float32; zeros if None.
        output_final_state: return the state after the last token too.
        use_qk_l2norm_in_kernel: normalise q and k to norm 1 first.
        use_gate_in_kernel: g is raw: the decay is -exp(A_log) softplus(g + dt_bias), or, with
            lower_bound given, lower_bound sigmoid(exp(A_log) (g + dt_bias)).
        A_log: [HV], for use_gate_in_kernel; with lower_bound None stands for zeros.
        dt_bias: [HV K] or [HV, K], for use_gate_in_kernel; none if None.
        use_beta_sigmoid_in_kernel: beta is raw: sigmoid(beta) is used, rounded to beta's dtype.
        allow_neg_eigval: 2 sigmoid(beta), so that the transition has eigenvalues down to -1.
        safe_gate: the decay is bounded: by lower_bound with use_gate_in_kernel, else as the caller
            promises. Kernels may use it to go faster; the result is the same with and without.
        lower_bound: of the decay, below 0.
        state_v_first: states are [N, HV, V, K] instead.
        reverse: run time backwards; the final state is then that before the first token.
        cu_seqlens: offsets [N+1] of N sequences packed in B == 1, int32 or int64.
        parents: int32 or int64 [N], the earlier sequence at whose end each goes on, -1 for none: a
            row of prefix trees (PrefixTree).
        context: a slipstream.parallel.ContextParallel, with this rank's tokens, the states of all
            sequences and no cu_seqlens. None: one rank has all tokens.
        chunk_size: a hint, tokens a chunk in plain torch, 32 or 64; Triton's kernels have their
            own. Chosen if None.
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
    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025).
    """
    checks.expect_rank("beta", beta, 3, "[B, T, HV]")
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size not in (32, 64)):
        raise ValueError(f"chunk_size: want 32 or 64, got {chunk_size!r}")
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise ValueError(
            "lower_bound: want a number below 0 with safe_gate and use_gate_in_kernel, got None"
        )
    if use_qk_l2norm_in_kernel:
        q, k = _preprocess.l2_normalised(impl, q=q, k=k)
    g = channel_gate(g, use_gate_in_kernel, A_log, dt_bias, lower_bound, impl)
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
def fused_recurrent_kda(
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
    lower_bound: float | None = None,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_kda, but that beta may also be [B, T, HV, V], for each
    column of the state. Cost: 7 T HV K V flops, one after the other.
    """
    checks.expect_tensor("beta", beta)
    if use_qk_l2norm_in_kernel:
        q, k = _preprocess.l2_normalised(impl, q=q, k=k)
    g = channel_gate(g, use_gate_in_kernel, A_log, dt_bias, lower_bound, impl)
    if use_beta_sigmoid_in_kernel or allow_neg_eigval:
        beta = _preprocess.beta_sigmoid(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return run(
        LinearInputs(q, k, v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context),
        recurrent=True,
    )


def channel_gate(
    g: Tensor,
    is_raw: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    impl: str | None,
) -> Tensor:
    """Log decays of every channel, computed by delta_gate if they are raw."""
    checks.expect_rank("g", g, 4, "[B, T, HV, K]")
    checks.expect_lower_bound(lower_bound)
    return _preprocess.delta_gate(g, A_log, dt_bias, lower_bound, impl) if is_raw else g


# of terms, for users
GDN2_NAMES = {"erase": "b", "write": "w"}


@checks.operator
@trees.as_context
def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
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
    """Gated DeltaNet-2, chunkwise: each channel of the key has a decay and an erase of its own.

        S_t = (I - k_t (b_t * k_t)^T) diag(exp(g_t)) S_{t-1} + k_t (w_t * v_t)^T
        o_t = scale * S_t^T q_t

    KDA is b = w = beta. The kernels for sm_90 in 16 bits are KDA's with two more tensors to read;
    elsewhere it is dplr_delta_rule with a = -exp(g) * b * k, b = k and w * v for v.

    Args:
        q, k: queries and keys [B, T, H, K]; keys of norm 1 keep the recurrence stable.
        v: values [B, T, HV, V], HV a multiple of H: head hv reads q, k of head hv // (HV // H).
        g: log decay [B, T, HV, K], at most 0, float32.
        b: how much of the old value to erase, by channel of the key [B, T, HV, K], in (0, 1), or
            (0, 2).
        w: how much of the new value to write [B, T, HV, V], in (0, 1).
        chunk_size: as chunk_dplr_delta_rule. The others: as chunk_kda.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final state [N, HV, K, V], float32, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: as chunk_kda on sm_90 in 16 bits with b and w of q's dtype. Else as
    chunk_dplr_delta_rule, plus a tensor of the size of g and, if HV > H, copies of q and k for
    each value head.
    Source: the recurrence of fla-core 0.6.0, fla/ops/gdn2.
    """
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise ValueError(
            "lower_bound: want a number below 0 with safe_gate and use_gate_in_kernel, got None"
        )
    g = channel_gate(g, use_gate_in_kernel, A_log, dt_bias, lower_bound, impl)
    terms = _gdn2_terms(q, k, v, g, b, w, use_qk_l2norm_in_kernel, impl)
    if context is not None or not channel_gates.takes_as_they_are(terms, impl):
        terms = channel_gates.as_dplr(terms, partial(erase, impl=impl))
    return run(
        terms._replace(initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(scale, output_final_state, state_v_first, reverse, chunk_size, impl, context),
        recurrent=False,
        names=GDN2_NAMES,
    )


@checks.operator
@trees.as_context
def fused_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet-2, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_gdn2. Cost: 8 T HV K V flops, one after the other.
    """
    g = channel_gate(g, use_gate_in_kernel, A_log, dt_bias, lower_bound, impl)
    terms = channel_gates.as_dplr(
        _gdn2_terms(q, k, v, g, b, w, use_qk_l2norm_in_kernel, impl), partial(erase, impl=impl)
    )
    return run(
        terms._replace(initial_state=initial_state, cu_seqlens=cu_seqlens),
        LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context),
        recurrent=True,
    )


def _gdn2_terms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    normalise: bool,
    impl: str | None,
) -> inputs.LinearInputs:
    _preprocess.expect_inputs(
        None, None, q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"),
        g=(g, "B T HV K"), b=(b, "B T HV K"), w=(w, "B T HV V"),
    )  # fmt: skip
    if normalise:
        q, k = _preprocess.l2_normalised(impl, q=q, k=k)
    return inputs.LinearInputs(q, k, v, g=g, erase=b, write=w)
