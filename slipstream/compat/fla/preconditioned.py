"""fla's operators with a preconditioner: two states apart, and keys of norm 1."""

from typing import Any

import torch
from torch import Tensor

from slipstream import ops
from slipstream.compat.fla.adaptor import with_context, with_one_dtype

Result = tuple[Tensor, Tensor | None, Tensor | None]


def chunk_precond_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_atk: Tensor,
    g: Tensor,
    beta_atk: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_A_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    transpose_state_layout: bool = False,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Tensor | None = None,
) -> Result:
    """slipstream.ops.chunk_precond_gated_delta_rule: o, S and A, each None if not asked for."""
    return _call(
        ops.chunk_precond_gated_delta_rule, initial_state, initial_A_state, cp_context,
        q=q, k=k, v=v, g_atk=g_atk, g=g, beta_atk=beta_atk, beta=beta, scale=scale,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens, state_v_first=transpose_state_layout, x=x, eps=eps,
        log_atk_scale=log_atk_scale,
    )  # fmt: skip


def fused_recurrent_precond_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    g_atk: Tensor | None = None,
    beta_atk: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_A_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None,
    transpose_state_layout: bool = False,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Tensor | None = None,
) -> Result:
    """slipstream.ops.fused_recurrent_precond_gated_delta_rule, with gates of heads alone."""
    _refuse("fused_recurrent_precond_gated_delta_rule", gk=gk, gv=gv)
    return _call(
        ops.fused_recurrent_precond_gated_delta_rule, initial_state, initial_A_state, None,
        q=q, k=k, v=v, g_atk=g_atk, g=g, beta_atk=beta_atk, beta=beta, scale=scale,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens, state_v_first=transpose_state_layout, x=x, eps=eps,
        log_atk_scale=log_atk_scale,
    )  # fmt: skip


def naive_recurrent_precond_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_atk: Tensor,
    g: Tensor,
    beta_atk: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_A_state: Tensor | None = None,
    output_final_state: bool = False,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Tensor | float | None = None,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """The reference of slipstream.ops.fused_recurrent_precond_gated_delta_rule, which fla's layer
    imports; q and k are normalised."""
    if isinstance(log_atk_scale, (int, float)):
        log_atk_scale = k.new_full((k.shape[2],), log_atk_scale, dtype=torch.float32)
    return _call(
        ops.fused_recurrent_precond_gated_delta_rule, initial_state, initial_A_state, None,
        q=q, k=k, v=v, g_atk=g_atk, g=g, beta_atk=beta_atk, beta=beta, scale=scale,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens, state_v_first=False, x=x, eps=eps, log_atk_scale=log_atk_scale,
        impl="reference",
    )  # fmt: skip


def chunk_precond_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    g_atk: Tensor,
    beta_atk: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_A_state: Tensor | None = None,
    output_final_state: bool = False,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    transpose_state_layout: bool = False,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Tensor | None = None,
    solve_tril_precision: str | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    **kwargs: Any,
) -> Result:
    """slipstream.ops.chunk_precond_kda, which normalises q and k; kwargs: A_log and dt_bias."""
    _refuse("chunk_precond_kda", return_intermediate_states=return_intermediate_states or None)
    kwargs.pop("use_qk_l2norm_in_kernel", None)  # fla's are normalised whatever it is
    return _call(
        ops.chunk_precond_kda, initial_state, initial_A_state, cp_context,
        q=q, k=k, v=v, g=g, g_atk=g_atk, beta_atk=beta_atk, beta=beta, scale=scale,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=use_gate_in_kernel, lower_bound=lower_bound, cu_seqlens=cu_seqlens,
        state_v_first=transpose_state_layout, x=x, eps=eps, log_atk_scale=log_atk_scale, **kwargs,
    )  # fmt: skip


def fused_recurrent_precond_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    g_atk: Tensor,
    beta_atk: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_A_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    transpose_state_layout: bool = False,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Tensor | None = None,
    **kwargs: Any,
) -> Result:
    """slipstream.ops.fused_recurrent_precond_kda, with fla's defaults."""
    return _call(
        ops.fused_recurrent_precond_kda, initial_state, initial_A_state, None,
        q=q, k=k, v=v, g=g, g_atk=g_atk, beta_atk=beta_atk, beta=beta, scale=scale,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, cu_seqlens=cu_seqlens, state_v_first=transpose_state_layout,
        x=x, eps=eps, log_atk_scale=log_atk_scale, **kwargs,
    )  # fmt: skip


def _refuse(function: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name}: Slipstream's {function} does not have it")


def _call(
    operator: Any, S: Tensor | None, A: Tensor | None, cp_context: Any, **given: Any
) -> Result:
    """Both states as one tuple; where only one is given the other is zeros."""
    given, states = with_context(given, cp_context), None
    if cp_context is not None and (S is None) != (A is None):
        raise NotImplementedError("cp_context: want both states beside it, or none")
    if S is not None or A is not None:
        k, v, offsets = given["k"], given["v"], given["cu_seqlens"]
        N, K, V = k.shape[0] if offsets is None else len(offsets) - 1, k.shape[3], v.shape[3]
        if S is None:
            shape = (V, K) if given["state_v_first"] else (K, V)
            S = v.new_zeros(N, v.shape[2], *shape, dtype=torch.float32)
        if A is None:
            A = k.new_zeros(N, k.shape[2], K, dtype=torch.float32)
        states = S, A
    given, dtype = with_one_dtype(given, ("q", "k", "v"))
    o, after = operator(**given, initial_state=states)
    return (o.to(dtype), None, None) if after is None else (o.to(dtype), *after)
