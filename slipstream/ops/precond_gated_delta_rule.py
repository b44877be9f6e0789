"""The preconditioned gated delta rule: keys are written by the curvature of those before."""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.dispatch import LinearOptions
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.ops._preconditioner import Preconditioner, run_preconditioned
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
        initial_state: states before the first token, a tuple (S [N, HV, K, V], A [N, H, K]),
            float32; zeros if None.
        x: the factors are from 1 / x to x; above 2 the recurrence may grow.
        eps: added to A.
        log_atk_scale: log A where the factor is 1 [H]; -0.2 if None.
        state_v_first: S is [N, HV, V, K] instead.
        the others: as chunk_gated_delta_rule.

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
    checks.expect_rank("g", g, 3, "[B, T, HV]")
    return run_preconditioned(
        LinearInputs(q, k, v, g=g, beta=beta, cu_seqlens=cu_seqlens),
        initial_state,
        Preconditioner(g_atk, beta_atk, log_atk_scale, x, eps),
        options,
        normalise=use_qk_l2norm_in_kernel,
        recurrent=False,
    )


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
    checks.expect_rank("g", g, 3, "[B, T, HV]")
    return run_preconditioned(
        LinearInputs(q, k, v, g=g, beta=beta, cu_seqlens=cu_seqlens),
        initial_state,
        Preconditioner(g_atk, beta_atk, log_atk_scale, x, eps),
        options,
        normalise=use_qk_l2norm_in_kernel,
        recurrent=True,
    )
