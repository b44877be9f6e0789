"""The table of fla's operators: where fla has each, with which arguments, and what it is here.

The signatures are those of fla-core 0.6.0. docs/guides/migrate_fla.md is written from this table.
"""

from functools import partial
from typing import Any

import torch

from slipstream import ops
from slipstream.compat.fla.adaptor import Arguments, Operator
from slipstream.compat.fla.functions import fused_additive_gate

# parameters that several operators have
STATE = "scale=None, initial_state=None, output_final_state=False"
DELTA = (
    f"q, k, v, beta, {STATE}, use_qk_l2norm_in_kernel=False, cu_seqlens=None, "
    "cu_seqlens_cpu=None, **kwargs"
)
GLA = f"q, k, v, g, {STATE}, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None"
SIMPLE_GLA = f"q, k, v, g=None, g_gamma=None, {STATE}"
LINEAR = f"q, k, v, {STATE}, normalize=True, cu_seqlens=None"
GATED_DELTA = (
    f"q, k, v, g, beta, {STATE}, use_qk_l2norm_in_kernel=False, "
    "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, "
    "cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs"
)
RECURRENT_GATED_DELTA = (
    f"q, k, v, g=None, gk=None, gv=None, beta=None, {STATE}, use_qk_l2norm_in_kernel=False, "
    "use_gate_in_kernel=False, A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, "
    "allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, **kwargs"
)
ALIASED = "fla raises; here it is the chunkwise operator"


def _normalized_state(given: Arguments, normalize: bool = True) -> Arguments:
    """With normalize, a state without the sum of keys: none has been written yet."""
    state = given.get("initial_state")
    if not given.get("normalize", normalize) or not isinstance(state, torch.Tensor):
        return given
    N, H, K, _ = state.shape
    return given | {"initial_state": (state, state.new_zeros(N, 1, H, K))}


def _gate_of_slots(given: Arguments) -> Arguments:
    """Without g each slot is a mean, of each packed sequence and beside a state too."""
    if isinstance(given.get("initial_state"), list):  # what fla's fused_recurrent_gsa returns
        given = given | {"initial_state": tuple(given["initial_state"])}
    if given.get("g") is not None or given.get("reverse"):
        return given
    s, g, _ = fused_additive_gate(
        given["s"], cu_seqlens=given.get("cu_seqlens"), gate_dtype=torch.float32
    )
    return given | {"s": s, "g": g}


def _of_unit_keys(given: Arguments) -> Arguments:
    kk, a = given.pop("kk"), given.pop("a")
    return given | {"a": -kk, "b": kk * a}


def _without_scores(result: Any) -> Any:
    """fla's parallel_* return the scores second, if they are asked for."""
    return result[0], None


OPERATORS = (
    Operator(
        "ops.abc.chunk", "chunk_abc", "q, k, v, s, initial_state=None, output_final_state=False",
        other=ops.chunk_gsa, change=_gate_of_slots,
    ),
    Operator(
        "ops.attn.parallel", "parallel_attn",
        "q, k, v, g=None, scale=None, window_size=None, cu_seqlens=None, "
        "chunk_indices=None, *, sink_bias=None",
        other=ops.attention, renamed={"sink_bias": "sinks"},
    ),
    Operator(
        "ops.forgetting_attn.parallel", "parallel_forgetting_attn",
        "q, k, v, g, scale=None, window_size=None, cu_seqlens=None",
        other=ops.attention,
    ),
    Operator(
        "ops.comba.chunk", "chunk_comba",
        f"q, k, v, p, g, beta=None, {STATE}, use_qk_l2norm_in_kernel=False, "
        "cu_seqlens=None, cu_seqlens_cpu=None",
    ),
    Operator(
        "ops.comba.fused_recurrent", "fused_recurrent_comba",
        f"q, k, p, v, g, beta=None, {STATE}, use_qk_l2norm_in_kernel=False, cu_seqlens=None",
        note="by position p is before v, as fla has it",
    ),
    Operator(
        "ops.gdn2.chunk", "chunk_gdn2",
        f"q, k, v, g, b, w, {STATE}, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, "
        "cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, lower_bound=None, "
        "disable_recompute=False, return_intermediate_states=False, state_v_first=False, "
        "cp_context=None, **kwargs",
    ),
    Operator(
        "ops.gdn2.fused_recurrent", "fused_recurrent_gdn2",
        "q, k, v, g, b, w, A_log=None, dt_bias=None, scale=None, initial_state=None, "
        "output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, "
        "lower_bound=None, state_v_first=False, cu_seqlens=None, **kwargs",
    ),
    Operator("ops.delta_rule.chunk", "chunk_delta_rule", DELTA),
    Operator(
        "ops.delta_rule.fused_chunk", "fused_chunk_delta_rule", DELTA,
        other=ops.chunk_delta_rule, note=ALIASED,
    ),
    Operator(
        "ops.delta_rule.fused_recurrent", "fused_recurrent_delta_rule",
        f"q, k, v, beta=None, {STATE}, use_qk_l2norm_in_kernel=False, cu_seqlens=None",
    ),
    Operator(
        "ops.gated_delta_product.chunk", "chunk_gated_delta_product",
        f"q, k, v, g, beta, num_householder, {STATE}, use_qk_l2norm_in_kernel=False, "
        "cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None",
    ),
    Operator("ops.gated_delta_rule.chunk", "chunk_gated_delta_rule", GATED_DELTA),
    Operator(
        "ops.gated_delta_rule.chunk", "chunk_gdn", GATED_DELTA,
        other=ops.chunk_gated_delta_rule,
    ),
    Operator(
        "ops.gated_delta_rule.fused_recurrent", "fused_recurrent_gated_delta_rule",
        RECURRENT_GATED_DELTA,
    ),
    Operator(
        "ops.gated_delta_rule.fused_recurrent", "fused_recurrent_gdn", RECURRENT_GATED_DELTA,
        other=ops.fused_recurrent_gated_delta_rule,
    ),
    Operator(
        "ops.generalized_delta_rule.dplr.chunk", "chunk_dplr_delta_rule",
        f"q, k, v, a, b, gk, {STATE}, cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, "
        "chunk_size=None, disable_recompute=False, cp_context=None, lower_bound=None, "
        "**kwargs",
    ),
    Operator(
        "ops.generalized_delta_rule.dplr.fused_recurrent", "fused_recurrent_dplr_delta_rule",
        f"q, k, v, a, b, gk, {STATE}, reverse=False, cu_seqlens=None",
    ),
    Operator("ops.gla.chunk", "chunk_gla", GLA),
    Operator("ops.gla.fused_chunk", "fused_chunk_gla", GLA, other=ops.chunk_gla, note=ALIASED),
    Operator(
        "ops.gla.fused_recurrent", "fused_recurrent_gla",
        f"q, k, v, gk=None, gv=None, {STATE}, reverse=False, state_v_first=False, "
        "cu_seqlens=None, **kwargs",
    ),
    Operator(
        "ops.gsa.chunk", "chunk_gsa",
        f"q, k, v, s, g=None, {STATE}, checkpoint_level=2, cu_seqlens=None, "
        "cu_seqlens_cpu=None, **kwargs",
        change=_gate_of_slots,
    ),
    Operator(
        "ops.gsa.fused_recurrent", "fused_recurrent_gsa",
        f"q, k, v, s, g=None, {STATE}, reverse=False, cu_seqlens=None",
        change=_gate_of_slots,
    ),
    Operator("ops.hgrn.chunk", "chunk_hgrn", "x, g, initial_state=None, output_final_state=False"),
    Operator(
        "ops.hgrn.fused_recurrent", "fused_recurrent_hgrn",
        "x, g, initial_state=None, output_final_state=False, cu_seqlens=None",
    ),
    Operator(
        "ops.kda.chunk", "chunk_kda",
        f"q, k, v, g, beta, {STATE}, use_qk_l2norm_in_kernel=False, "
        "use_gate_in_kernel=False, "
        "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, "
        "lower_bound=None, disable_recompute=False, return_intermediate_states=False, "
        "state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, "
        "use_graph=False, max_num_seqs=None, **kwargs",
    ),
    Operator(
        "ops.kda.fused_recurrent", "fused_recurrent_kda",
        f"q, k, v, g, beta, A_log=None, dt_bias=None, {STATE}, "
        "use_qk_l2norm_in_kernel=False, "
        "use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, "
        "lower_bound=None, state_v_first=False, cu_seqlens=None, **kwargs",
    ),
    Operator(
        "ops.lightning_attn.chunk", "chunk_lightning_attn",
        f"q, k, v, layer_idx, num_layers, {STATE}, cu_seqlens=None, **kwargs",
    ),
    Operator(
        "ops.lightning_attn.fused_recurrent", "fused_recurrent_lightning_attn",
        f"q, k, v, layer_idx, num_layers, {STATE}, reverse=False, cu_seqlens=None",
    ),
    Operator("ops.linear_attn.chunk", "chunk_linear_attn", LINEAR, change=_normalized_state),
    Operator(
        "ops.linear_attn.fused_chunk", "fused_chunk_linear_attn", LINEAR,
        other=ops.chunk_linear_attn, change=_normalized_state,
    ),
    Operator(
        "ops.linear_attn.fused_recurrent", "fused_recurrent_linear_attn",
        f"q, k, v, {STATE}, reverse=False, normalize=False, cu_seqlens=None",
        change=partial(_normalized_state, normalize=False),
    ),
    Operator(
        "ops.retention.chunk", "chunk_retention", f"q, k, v, {STATE}, cu_seqlens=None, **kwargs",
    ),
    Operator(
        "ops.retention.fused_chunk", "fused_chunk_retention", f"q, k, v, {STATE}, cu_seqlens=None",
        other=ops.chunk_retention,
    ),
    Operator(
        "ops.retention.fused_recurrent", "fused_recurrent_retention",
        f"q, k, v, {STATE}, reverse=False, state_v_first=False, cu_seqlens=None, **kwargs",
    ),
    Operator(
        "ops.retention.parallel", "parallel_retention",
        "q, k, v, scale=None, output_attentions=False, cu_seqlens=None",
        other=ops.chunk_retention, result=_without_scores,
        note="no scores: output_attentions=True is refused",
    ),
    Operator(
        "ops.rwkv6.chunk", "chunk_rwkv6",
        f"r, k, v, w, u, {STATE}, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs",
    ),
    Operator(
        "ops.rwkv6.fused_recurrent", "fused_recurrent_rwkv6",
        f"r, k, v, w, u, {STATE}, reverse=False, cu_seqlens=None",
    ),
    Operator(
        "ops.rwkv7.chunk", "chunk_rwkv7",
        "r, w, k, v, a, b, scale=1.0, initial_state=None, output_final_state=False, "
        "cu_seqlens=None, cu_seqlens_cpu=None, safe_gate=False, chunk_size=None, "
        "disable_recompute=False, cp_context=None, lower_bound=None",
    ),
    Operator(
        "ops.rwkv7.fused_recurrent", "fused_recurrent_rwkv7",
        "r, w, k, v, a, b, scale=None, initial_state=None, output_final_state=True, "
        "cu_seqlens=None",
        note="scale is K^-0.5 by default, as fla has it; slipstream.ops has 1",
    ),
    Operator(
        "ops.rwkv7.fused_recurrent", "fused_mul_recurrent_rwkv7",
        "r, w, k, v, kk, a, scale=1.0, initial_state=None, output_final_state=False, "
        "reverse=False, cu_seqlens=None",
        other=ops.fused_recurrent_rwkv7, change=_of_unit_keys, note="with a = -kk, b = kk a",
    ),
    Operator(
        "ops.simple_gla.chunk", "chunk_simple_gla",
        f"{SIMPLE_GLA}, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs",
    ),
    Operator(
        "ops.simple_gla.fused_chunk", "fused_chunk_simple_gla", f"{SIMPLE_GLA}, cu_seqlens=None",
        other=ops.chunk_simple_gla,
    ),
    Operator(
        "ops.simple_gla.fused_recurrent", "fused_recurrent_simple_gla",
        f"{SIMPLE_GLA}, reverse=False, state_v_first=False, cu_seqlens=None, **kwargs",
    ),
    Operator(
        "ops.simple_gla.parallel", "parallel_simple_gla",
        "q, k, v, g=None, scale=None, output_attentions=False, cu_seqlens=None, "
        "cu_seqlens_cpu=None",
        other=ops.chunk_simple_gla, result=_without_scores,
        note="no scores: output_attentions=True is refused",
    ),
)  # fmt: skip
