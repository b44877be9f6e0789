"""fla's operators with a preconditioner: two states apart, and keys of norm 1."""

from typing import Any

import torch

from slipstream import ops
from slipstream.compat.fla.adaptor import Arguments, Operator, adapt

STATES = "scale=None, initial_state=None, initial_A_state=None, output_final_state=False"
KEYS = "x=1.5, eps=1e-6, log_atk_scale=None"


def _one_state(given: Arguments) -> Arguments:
    """Both states as one tuple; where only one is given the other is zeros."""
    S, A = given.pop("initial_state", None), given.pop("initial_A_state", None)
    if S is None and A is None:
        return given
    if given.get("context") is not None and (S is None or A is None):
        raise NotImplementedError("cp_context: want both states beside it, or none")
    k, v, offsets = given["k"], given["v"], given.get("cu_seqlens")
    N, K, V = k.shape[0] if offsets is None else len(offsets) - 1, k.shape[3], v.shape[3]
    if S is None:
        shape = (V, K) if given.get("state_v_first") else (K, V)
        S = v.new_zeros(N, v.shape[2], *shape, dtype=torch.float32)
    if A is None:
        A = k.new_zeros(N, k.shape[2], K, dtype=torch.float32)
    return given | {"initial_state": (S, A)}


def _of_heads(given: Arguments) -> Arguments:
    for name in ("gk", "gv"):
        _refuse(given, name)
    return _one_state(given)


def _unit_keys(given: Arguments) -> Arguments:
    """fla's are normalised whatever use_qk_l2norm_in_kernel is."""
    _refuse(given, "return_intermediate_states")
    for name in ("safe_gate", "solve_tril_precision"):
        given.pop(name, None)
    return _one_state(given) | {"use_qk_l2norm_in_kernel": True}


def _reference(given: Arguments) -> Arguments:
    scale = given.get("log_atk_scale")
    if isinstance(scale, int | float):
        k = given["k"]
        scale = k.new_full((k.shape[2],), scale, dtype=torch.float32)
    own = {"impl": "reference", "use_qk_l2norm_in_kernel": True, "log_atk_scale": scale}
    return _one_state(given) | own


def _refuse(given: Arguments, name: str) -> None:
    value = given.pop(name, None)
    if value is not None and value is not False:
        raise NotImplementedError(f"{name}: Slipstream's operator does not have it")


def _apart(result: tuple) -> tuple:
    """o, S and A, each None if not asked for."""
    o, states = result
    return (o, None, None) if states is None else (o, *states)


def _operator(
    path: str, name: str, signature: str, change: Any = _one_state, other: Any = None
) -> Any:
    names = {"transpose_state_layout": "state_v_first"}
    return adapt(Operator(path, name, signature, names, change, _apart, "", other))


chunk_precond_gated_delta_rule = _operator(
    "ops.precond_gated_delta_rule.chunk", "chunk_precond_gated_delta_rule",
    f"q, k, v, g_atk, g, beta_atk, beta, {STATES}, use_qk_l2norm_in_kernel=True, cu_seqlens=None, "
    f"cu_seqlens_cpu=None, cp_context=None, transpose_state_layout=False, {KEYS}",
)  # fmt: skip
fused_recurrent_precond_gated_delta_rule = _operator(
    "ops.precond_gated_delta_rule.fused_recurrent", "fused_recurrent_precond_gated_delta_rule",
    f"q, k, v, g=None, gk=None, gv=None, beta=None, g_atk=None, beta_atk=None, {STATES}, "
    f"use_qk_l2norm_in_kernel=True, cu_seqlens=None, transpose_state_layout=False, {KEYS}",
    _of_heads,
)  # fmt: skip
naive_recurrent_precond_gated_delta_rule = _operator(
    "ops.precond_gated_delta_rule.naive", "naive_recurrent_precond_gated_delta_rule",
    f"q, k, v, g_atk, g, beta_atk, beta, {STATES}, {KEYS}, cu_seqlens=None",
    _reference, ops.fused_recurrent_precond_gated_delta_rule,
)  # fmt: skip
chunk_precond_kda = _operator(
    "ops.precond_kda.chunk", "chunk_precond_kda",
    f"q, k, v, g, g_atk, beta_atk, beta, {STATES}, use_gate_in_kernel=False, safe_gate=False, "
    "lower_bound=None, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, "
    f"transpose_state_layout=False, {KEYS}, solve_tril_precision=None, disable_recompute=False, "
    "return_intermediate_states=False, **kwargs",
    _unit_keys,
)  # fmt: skip
fused_recurrent_precond_kda = _operator(
    "ops.precond_kda.fused_recurrent", "fused_recurrent_precond_kda",
    f"q, k, v, g, g_atk, beta_atk, beta, A_log=None, dt_bias=None, {STATES}, "
    "use_qk_l2norm_in_kernel=True, use_gate_in_kernel=False, lower_bound=None, cu_seqlens=None, "
    f"transpose_state_layout=False, {KEYS}, **kwargs",
)  # fmt: skip
