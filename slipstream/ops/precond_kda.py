"""Preconditioned KDA: Kimi delta attention that writes keys by the curvature of those before."""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.dispatch import LinearOptions
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.ops._preconditioner import Preconditioner, run_preconditioned
from slipstream.ops.kda import channel_gate
from slipstream.runtime.context_parallel import ContextParallel

States = tuple[Tensor, Tensor]


@checks.operator
def chunk_precond_kda(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    g_atk: Tensor,
    beta_atk: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
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
    """Preconditioned KDA, chunkwise: chunk_precond_gated_delta_rule with a decay for each channel.

        A_t = exp(g_atk_t) A_{t-1} + beta_atk_t k_t * k_t
        r_t = log(A_t + eps) - log_atk_scale;  m_t = x^(-r_t / (1 + |r_t|))
        S'_t = diag(exp(g_t)) S_{t-1}
        S_t = S'_t + beta_t (m_t * k_t) (v_t - S'_t^T k_t)^T
        o_t = scale * S_t^T q_t

    The kernels for sm_90 in 16 bits take it as gdn2 with m * k for k, b = beta / m and w = beta;
    elsewhere it is dplr_delta_rule with a = -exp(g) * k, b = beta m * k, m * k for k and beta v
    for v.
    Arguments have to be named: fla's two operators have different orders.

    Args:
        g: log decay of S [B, T, HV, K], at most 0, float32.
        use_gate_in_kernel, A_log, dt_bias, lower_bound: g is raw, as for chunk_kda.
        the others: as chunk_precond_gated_delta_rule.

    Returns:
        o [B, T, HV, V] in q's dtype, and the final states, a tuple like initial_state, or None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: that of chunk_gdn2, and before it a scan and a few passes over B T H K floats. States
    HV K V + H K floats.
    Source: "Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear Recurrences"
    (arXiv 2604.21100), as fla-core 0.6.0 has it.
    """
    options = LinearOptions(
        scale, output_final_state, state_v_first, reverse, chunk_size, impl, context
    )
    g = channel_gate(g, use_gate_in_kernel, A_log, dt_bias, lower_bound, impl)
    return run_preconditioned(
        LinearInputs(q, k, v, g=g, beta=beta, cu_seqlens=cu_seqlens),
        initial_state,
        Preconditioner(g_atk, beta_atk, log_atk_scale, x, eps),
        options,
        normalise=use_qk_l2norm_in_kernel,
        recurrent=False,
    )


@checks.operator
def fused_recurrent_precond_kda(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    g_atk: Tensor,
    beta_atk: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Tensor | None = None,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, States | None]:
    """Preconditioned KDA, token by token: for decoding and short sequences, with gradients.

    Arguments, result and errors as chunk_precond_kda. Cost: 8 T HV K V flops, one after the other.
    """
    options = LinearOptions(scale, output_final_state, state_v_first, reverse, None, impl, context)
    g = channel_gate(g, use_gate_in_kernel, A_log, dt_bias, lower_bound, impl)
    return run_preconditioned(
        LinearInputs(q, k, v, g=g, beta=beta, cu_seqlens=cu_seqlens),
        initial_state,
        Preconditioner(g_atk, beta_atk, log_atk_scale, x, eps),
        options,
        normalise=use_qk_l2norm_in_kernel,
        recurrent=True,
    )
