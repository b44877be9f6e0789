"""vLLM's linear attention by slipstream: prefill, decode and verify of GDN, the step of Mamba.

    from slipstream.integrations import vllm

    vllm.register()  # in every worker, which slipstream_plugins does if it is asked

Written for vLLM 0.26 to 0.33, which is imported where it is needed. register() replaces what vLLM
has a registry of operators for: the layer ChunkGatedDeltaRule, which prefills Gated DeltaNet of
Qwen's models, and the backend that updates the states of Mamba-1 and Mamba-2. Its layers call the
fused decode of Gated DeltaNet and KDA by name; delta_rule_update has its arguments, for a layer of
your own.

Pools are [blocks, HV, V, K], with any stride between blocks. Block 0 belongs to no sequence.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from slipstream.compat.mamba_ssm.ops.triton.selective_state_update import (
    selective_state_update as update_states,
)
from slipstream.integrations import serving, usage
from slipstream.kernels.elementwise.copy_states import copy_states
from slipstream.ops import chunk_gated_delta_rule as chunk_rule

__all__ = ["chunk_gated_delta_rule", "delta_rule_update", "register", "selective_state_update"]
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
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """vLLM's ChunkGatedDeltaRule for packed prompts [1, T, ...]; states are [N, HV, V, K]. o is
    written to core_attn_out too. options: further ones of ops.chunk_gated_delta_rule."""
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
        **options,
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
    beta: float = 1.0,
    threshold: float = 20.0,
    *,
    initial_state: Tensor,
    ssm_state_indices: Tensor,
    cu_seqlens: Tensor,
    num_accepted_tokens: Tensor | None = None,
    scale: float | None = None,
    is_kda: bool = False,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """As vLLM's fused_sigmoid_gating_delta_rule_update: a token of each sequence, or drafts.

    Args:
        a: raw gates [tokens, HV], or [tokens, HV K] if is_kda. b: raw beta [tokens, HV].
        q, k: [1, tokens, H, K]. v: [1, tokens, HV, V].
        beta, threshold: of the gates' softplus, which has no others here.
        initial_state: the pool. ssm_state_indices: blocks [N], or with drafts [N, S], of the state
            after each of them.
        num_accepted_tokens: [N], how many tokens of the last call were accepted. This call begins
            with the state after the last of these; 0 is read as 1.

    Returns:
        o [1, tokens, HV, V], and the pool.

    Raises:
        NotImplementedError: inplace_final_state is False, or another softplus.
    """
    if not inplace_final_state:
        raise NotImplementedError("inplace_final_state: want True, the states of the pool move on")
    if (beta, threshold) != (1.0, 20.0):
        raise NotImplementedError(f"beta, threshold: want 1 and 20, got {beta} and {threshold}")
    (_, tokens, HV, _), K = v.shape, q.shape[-1]
    # vLLM 0.26 hands on those of the whole batch, which drafts begin
    gates = a.reshape(1, -1, HV, K) if is_kda else a.reshape(1, -1, HV)
    parts = [q, k, v, gates[:, :tokens], b.reshape(1, -1, HV)[:, :tokens]]
    options: dict[str, Any] = {"A_log": A_log, "dt_bias": dt_bias, "scale": scale}
    options["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
    at = ssm_state_indices, cu_seqlens, num_accepted_tokens
    return next_tokens(parts, initial_state, *at, **options), initial_state


def next_tokens(
    parts: list[Tensor],
    pool: Tensor,
    ssm_state_indices: Tensor,
    cu_seqlens: Tensor,
    num_accepted_tokens: Tensor | None,
    **options: Any,
) -> Tensor:
    """o [1, tokens, HV, V] of serving.step for packed parts [1, tokens, ...], by vLLM's blocks as
    delta_rule_update has them."""
    tokens = parts[0].shape[1]
    blocks = _blocks(ssm_state_indices, cu_seqlens.shape[0] - 1)
    if num_accepted_tokens is None and blocks.shape[1] == 1:
        one = [serving.unpacked(x, cu_seqlens, 1) for x in parts]
        o = serving.step(*one, states=pool, slots=blocks[:, 0], **options)
    else:
        first = _first(blocks, num_accepted_tokens)
        is_token = torch.arange(blocks.shape[1], device=blocks.device) < cu_seqlens.diff()[:, None]
        o = serving.step_drafts(
            [serving.unpacked(x, cu_seqlens, blocks.shape[1]) for x in parts],
            states=pool,
            slots=first,
            into=pool,
            into_slots=torch.where(is_token, blocks, -1),
            **options,
        )
    return serving.packed(o, cu_seqlens, tokens)


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
    """As vLLM's Mamba SSU backends: a token x [N, heads, P] of each sequence, or drafts, into out.

    Args:
        state: the pool [blocks, heads, P, S], or [blocks, D, S] with x [N, D] of Mamba-1.
        state_batch_indices: blocks [N], or with drafts [N, T], to read from.
        dst_state_batch_indices: blocks to write to, those that are read if None.
        null_block_id: the block of no state: from it zeros are read, and nothing is written.
        num_accepted_tokens: [N], as delta_rule_update's: the state after each token is written to
            a block of its own. Without, the state after a sequence's last goes to the first block.
        cu_seqlens: [N + 1], of packed tokens, T or fewer of each sequence.
        is_blackwell: no effect.
    """
    if out is None:
        raise ValueError("out: want a tensor like x, got None")
    pool = state if state.dim() == 4 else state[:, None]
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    source = torch.arange(N, device=x.device)[:, None]
    if state_batch_indices is not None:
        source = _blocks(state_batch_indices, N, null_block_id)
    target = source
    if dst_state_batch_indices is not None:
        target = _blocks(dst_state_batch_indices, N, null_block_id)
    target = serving.slots_of(pool, target, "dst_state_batch_indices")
    first = serving.slots_of(pool, _first(source, num_accepted_tokens), "state_batch_indices")
    # as in vLLM's kernel, a state is rounded to the pool's dtype where it is written alone
    own = torch.empty(N, *pool.shape[1:], dtype=torch.float32, device=x.device)
    copy_states(pool, own, source_indices=first)
    outputs = []
    for t in range(1 if cu_seqlens is None else source.shape[1]):
        tokens: Any = x, dt, B, C, z
        into = target[:, 0 if num_accepted_tokens is None else t]
        if cu_seqlens is not None:
            at = cu_seqlens[:-1] + t
            tokens = [_rows(i, at.clamp(0, x.shape[0] - 1)) for i in tokens]
            into = torch.where(at < cu_seqlens[1:], into, -1)
        x_t, dt_t, B_t, C_t, z_t = tokens
        options: dict[str, Any] = {"z": z_t, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
        states = own.view(N, *state.shape[1:])
        outputs.append(update_states(states, x_t, dt_t, A, B_t, C_t, D, **options))
        copy_states(own, pool, target_indices=torch.where(first < 0, -1, into))
    y = torch.stack(outputs, 1)
    out.copy_(y[:, 0] if cu_seqlens is None else serving.packed(y, cu_seqlens, x.shape[0])[0])


def _blocks(indices: Tensor, N: int, null: int = NULL_BLOCK) -> Tensor:
    """Blocks [N, T] of N sequences, -1 for none."""
    blocks = indices[:N] if indices.dim() == 2 else indices[:N, None]
    return torch.where(blocks == null, -1, blocks)


def _first(blocks: Tensor, num_accepted_tokens: Tensor | None) -> Tensor:
    """The block [N] of the state after the last accepted token, where a call begins."""
    if num_accepted_tokens is None:
        return blocks[:, 0]
    # vLLM counts 0 for a padded row
    last = (num_accepted_tokens[: blocks.shape[0]].long() - 1).clamp(min=0)
    return blocks.gather(1, last[:, None])[:, 0]


def _rows(x: Tensor | None, at: Tensor) -> Tensor | None:
    """Rows at of x, expanded as x is: a number a head takes Mamba-2's faster way."""
    if x is None:
        return None
    once = x if x.stride(-1) else x[..., :1]
    return once.index_select(0, at).expand(-1, *x.shape[1:])


def register() -> None:
    """Puts slipstream in the place of vLLM's own, where vLLM has a registry of operators.

    In a process that has done so it does nothing, from any thread and after a fork.

    Raises:
        ImportError, AttributeError: there is no vLLM, or something of it is not there.
        NotImplementedError: its calls have other arguments. AssertionError: another plugin has
            registered the layer. Nothing is registered then.
    """
    try:
        import_module("slipstream.integrations.vllm_classes")
    except Exception as error:
        usage.refuse("vllm", error)
        raise
