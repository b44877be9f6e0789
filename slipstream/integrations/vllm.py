"""vLLM's linear attention by slipstream: prefill, decode and verify of GDN, Mamba-2's step.

    from slipstream.integrations import vllm

    vllm.register()  # in every worker: from a plugin of the group vllm.general_plugins

Written for vLLM 0.33, which is imported where it is needed. register() replaces what vLLM has a
registry for: the layer ChunkGatedDeltaRule, which prefills Gated DeltaNet, and the backend that
updates Mamba-2's states. For the fused decode of Gated DeltaNet and KDA it has none: its layers
call a function by name, whose arguments delta_rule_update has.

Pools are [blocks, HV, V, K], with any stride between blocks. Block 0 belongs to no sequence.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.compat.mamba_ssm.ops.triton.selective_state_update import (
    selective_state_update as update_states,
)
from slipstream.integrations.serving import packed, step, step_drafts, unpacked
from slipstream.ops import chunk_gated_delta_rule as chunk_rule

__all__ = [
    "chunk_gated_delta_rule",
    "delta_rule_update",
    "register",
    "selective_state_update",
]
NULL_BLOCK = 0


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    core_attn_out: Tensor | None = None,
    aiter_prefill_metadata: object | None = None,
) -> tuple[Tensor, Tensor | None]:
    """vLLM's ChunkGatedDeltaRule for packed prompts [1, T, ...]; states are [N, HV, V, K]. o is
    written to core_attn_out too."""
    o, final = chunk_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=True,
    )
    if core_attn_out is not None:
        core_attn_out.view(-1)[: o.numel()].copy_(o.reshape(-1))
    return o, final


def delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    initial_state: Tensor,
    ssm_state_indices: Tensor,
    cu_seqlens: Tensor,
    num_accepted_tokens: Tensor | None = None,
    scale: float | None = None,
    is_kda: bool = False,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
) -> tuple[Tensor, Tensor]:
    """As vLLM's fused_sigmoid_gating_delta_rule_update: a token of each sequence, or drafts.

    Args:
        a: raw gates [tokens, HV], or [tokens, HV K] if is_kda. b: raw beta [tokens, HV].
        q, k: [1, tokens, H, K]. v: [1, tokens, HV, V].
        initial_state: the pool. ssm_state_indices: blocks [N], or with drafts [N, S], of the state
            after each of them.
        num_accepted_tokens: [N], how many tokens of the last call were accepted, 1 or more. This
            call begins with the state after the last of these.

    Returns:
        o [1, tokens, HV, V], and the pool.
    """
    if not (inplace_final_state and use_qk_l2norm_in_kernel):
        raise NotImplementedError("want inplace_final_state and use_qk_l2norm_in_kernel")
    (_, tokens, HV, _), K = v.shape, q.shape[-1]
    gates = a.reshape(1, tokens, HV, K) if is_kda else a.reshape(1, tokens, HV)
    parts = [q, k, v, gates, b.reshape(1, tokens, HV)]
    options: dict[str, Any] = {"A_log": A_log, "dt_bias": dt_bias, "scale": scale}
    N = cu_seqlens.shape[0] - 1
    blocks = ssm_state_indices[:N]
    blocks = blocks if blocks.dim() == 2 else blocks[:, None]
    blocks = torch.where(blocks > NULL_BLOCK, blocks, -1)
    if num_accepted_tokens is None and blocks.shape[1] == 1:
        one = [unpacked(x, cu_seqlens, 1) for x in parts]
        o = step(*one, states=initial_state, slots=blocks[:, 0], **options)
    else:
        # the block of the state after the last accepted token, where this call's begin
        accepted = torch.zeros_like(blocks[:, 0])
        if num_accepted_tokens is not None:
            accepted = num_accepted_tokens[:N].to(blocks.dtype) - 1
        first = blocks.gather(1, accepted[:, None].long())[:, 0]
        is_token = torch.arange(blocks.shape[1], device=blocks.device) < cu_seqlens.diff()[:, None]
        o = step_drafts(
            [unpacked(x, cu_seqlens, blocks.shape[1]) for x in parts],
            states=initial_state,
            slots=first,
            into=initial_state,
            into_slots=torch.where(is_token, blocks, -1),
            **options,
        )
    return packed(o, cu_seqlens, tokens), initial_state


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    dst_state_batch_indices: Tensor | None = None,
    null_block_id: int = NULL_BLOCK,
    out: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    is_blackwell: bool = False,
) -> None:
    """As vLLM's Mamba SSU backends: a token x [N, heads, P] of each sequence, into `out`.

    Raises:
        NotImplementedError: drafts, or states that are read from one block and written to another.
    """
    if dst_state_batch_indices is not None or num_accepted_tokens is not None:
        raise NotImplementedError("selective_state_update: want one block a sequence, no drafts")
    if cu_seqlens is not None:
        raise NotImplementedError("cu_seqlens: want one token a sequence")
    slots = state_batch_indices
    if slots is not None:
        slots = slots[:, 0] if slots.dim() == 2 else slots
        slots = torch.where(slots == null_block_id, -1, slots)[: x.shape[0]]
    options: dict[str, Any] = {"z": z, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
    y = update_states(state, x, dt, A, B, C, D, state_batch_indices=slots, **options)
    if out is None:
        raise ValueError("out: want a tensor like x, got None")
    out.copy_(y)


def register() -> None:
    """Puts slipstream in the place of vLLM's own, where vLLM has a registry for it.

    Raises:
        ImportError: there is no vLLM.
    """
    from importlib import import_module

    custom = import_module("vllm.model_executor.custom_op")
    dispatch = import_module("vllm.model_executor.layers.mamba.ops.ssu_dispatch")

    @custom.CustomOp.register_oot(name="ChunkGatedDeltaRule")
    class ChunkGatedDeltaRule(custom.CustomOp):
        gdn_prefill_backend = "slipstream"

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return chunk_gated_delta_rule(*args, **kwargs)

    class SlipstreamSSUBackend(dispatch.MambaSSUBackend):
        @property
        def name(self) -> str:
            return "slipstream"

        def __call__(self, *args: Any, **kwargs: Any) -> None:
            selective_state_update(*args, **kwargs)

    dispatch._BACKEND_REGISTRY[dispatch.MambaBackendEnum.TRITON] = SlipstreamSSUBackend
