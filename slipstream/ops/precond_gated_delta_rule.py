"""The preconditioned gated delta rule: keys are written by the curvature of those before."""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.dispatch import LinearOptions, run
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.ops._fp32 import widen
from slipstream.ops._preconditioner import Preconditioner, two_states
from slipstream.ops._preprocess import l2_normalised
from slipstream.runtime.context_parallel import ContextParallel

States = tuple[Tensor, Tensor]


@checks.operator
def chunk_precond_gated_delta_rule(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_atk: Tensor,
    g: Tensor,
    beta_atk: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Tensor | None = None,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    chunk_size: int | None = None,
    impl: str | None = None,
) -> tuple[Tensor, States | None]:
    """The preconditioned gated delta rule, chunkwise: each channel is written by a rate of its own.

        A_t = exp(g_atk_t) A_{t-1} + beta_atk_t k_t * k_t
        r_t = log(A_t + eps) - log_atk_scale;  m_t = x^(-r_t / (1 + |r_t|))
        S_t = exp(g_t) S_{t-1} + beta_t (m_t * k_t) (v_t - exp(g_t) S_{t-1}^T k_t)^T
        o_t = scale * S_t^T q_t

    With x = 1 it is the gated delta rule. Arguments have to be named: fla's two operators have
    different orders.

    Args:
        q, k: queries and keys [B, T, H, K]; keys of norm 1 keep the recurrence stable.
        v: values [B, T, HV, V], HV a multiple of H: head hv reads q, k of head hv // (HV // H).
        g_atk: log decay of A [B, T, H], at most 0, float32.
        g: log decay of S [B, T, HV], at most 0, float32.
        beta_atk: how much of the new squares to add [B, T, H], in (0, 1).
        beta: how much of the old value to replace [B, T, HV], in (0, 1), or (0, 2).
        scale: factor on the output; K^-0.5 if None.
        initial_state: states before the first token, a tuple (S [N, HV, K, V], A [N, H, K]),
            float32; zeros if None.
        output_final_state: return the states after the last token too.
        use_qk_l2norm_in_kernel: normalise q and k to norm 1 first.
        x: the factors are from 1 / x to x; above 2 the recurrence may grow.
        eps: added to A.
        log_atk_scale: log A where the factor is 1 [H]; -0.2 if None.
        state_v_first: S is [N, HV, V, K] instead.
        reverse: run time backwards; the final states are then those before the first token.
        cu_seqlens: offsets [N+1] of N sequences packed in B == 1, int32 or int64.
        context: a slipstream.parallel.ContextParallel, with this rank's tokens, the states of all
            sequences and no cu_seqlens. None: one rank has all tokens.
        chunk_size: a hint, tokens a chunk in plain torch, a power of two from 16 to 256; Triton's
            kernels have their own. Chosen if None.
        impl: None chooses; "sm90", "triton", "eager" or "reference" is used or refused.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final states, a tuple like initial_state, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: that of chunk_comba, and before it a scan and a few passes over B T H K floats; where
    HV > H also q and k for each value head. States HV K V + H K floats.
    Source: "Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear Recurrences"
    (arXiv 2604.21100), as fla-core 0.6.0 has it.
    """
    options = LinearOptions(
        scale, output_final_state, state_v_first, reverse, chunk_size, impl, context
    )
    S, A = two_states(initial_state)
    terms = LinearInputs(q, k, v, g=g, beta=beta, initial_state=S, cu_seqlens=cu_seqlens)
    preconditioner = Preconditioner(g_atk, beta_atk, A, log_atk_scale, x, eps)
    return _run(terms, preconditioner, use_qk_l2norm_in_kernel, options, recurrent=False)


@checks.operator
def fused_recurrent_precond_gated_delta_rule(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_atk: Tensor,
    g: Tensor,
    beta_atk: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Tensor | None = None,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, States | None]:
    """The preconditioned gated delta rule, token by token, with gradients.

    Arguments, result and errors as chunk_precond_gated_delta_rule. Cost: 7 T HV K V flops, one
    after the other.
    """
    options = LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context)
    S, A = two_states(initial_state)
    terms = LinearInputs(q, k, v, g=g, beta=beta, initial_state=S, cu_seqlens=cu_seqlens)
    preconditioner = Preconditioner(g_atk, beta_atk, A, log_atk_scale, x, eps)
    return _run(terms, preconditioner, use_qk_l2norm_in_kernel, options, recurrent=True)


def _run(
    terms: LinearInputs,
    preconditioner: Preconditioner,
    normalise: bool,
    options: LinearOptions,
    *,
    recurrent: bool,
) -> tuple[Tensor, States | None]:
    q, k, v, g = terms.q, terms.k, terms.v, terms.g
    assert g is not None
    preconditioner.check(terms, "B T HV")
    if normalise:
        q, k = l2_normalised(q=q, k=k)
    written, A = preconditioner.keys(k, options, terms.cu_seqlens)
    if v.shape[2] != k.shape[2]:
        group = v.shape[2] // k.shape[2]
        q, k, written = (y.repeat_interleave(group, dim=2) for y in (q, k, written))
    # what is erased is read before the decay, so p has it
    p = (widen(g).exp()[..., None] * k).to(k.dtype)
    o, S = run(terms._replace(q=q, k=written, p=p), options, recurrent=recurrent)
    return o, None if S is None or A is None else (S, A)
