"""The functions that vLLM's layers call by name, with vLLM's arguments, on slipstream's operators.

vllm_layers puts them under these names in layers of its own. Indices of blocks are int32; block 0,
and what is below it, belongs to no sequence: nothing is read or written there. What another release
asks for besides raises NotImplementedError with its name, and the layer calls vLLM's own function.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.integrations import serving, vllm
from slipstream.kernels.elementwise.copy_states import copy_states
from slipstream.kernels.linear import prefix_states
from slipstream.ops import chunk_kda, chunk_simple_gla, selective_scan, short_convolution

ACTIVATIONS = (None, "silu", "swish")


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int = -1,
    null_block_id: int = 0,
    block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    num_computed_tokens: Tensor | None = None,
    block_size_to_align: int | None = 0,
    metadata: object | None = None,
    validate_data: bool = False,
) -> Tensor:
    """Packed prompts x [D, T] after what is in the pool [blocks, D, W - 1 or more]; the last W - 1
    inputs of each go back there."""
    expect_none(
        block_idx_first_scheduled_token=block_idx_first_scheduled_token,
        block_idx_last_scheduled_token=block_idx_last_scheduled_token,
        initial_state_idx=initial_state_idx,
        num_computed_tokens=num_computed_tokens,
    )
    if cache_indices is None:
        raise NotImplementedError("cache_indices: want blocks of a pool, got None")
    if (pad_slot_id, null_block_id) != (-1, 0):
        raise NotImplementedError(f"null_block_id: want 0, got {null_block_id} and {pad_slot_id}")
    at = written(cache_indices, query_start_loc), has_initial_state, query_start_loc
    (y,) = convolved([x.mT], conv_states, [weight], [bias], _activation(activation), *at)
    return y[0].mT


def convolved(
    parts: list[Tensor],
    conv_states: Tensor,
    weights: list[Tensor],
    biases: Sequence[Tensor | None],
    activation: str | None,
    slots: Tensor,
    has_initial_state: Tensor | None,
    offsets: Tensor,
) -> list[Tensor]:
    """[1, T, D] of each of packed prompts [T, D], whose channels lie one behind the other in the
    pool: one copy from it, and one to it."""
    count, width = len(parts), weights[0].shape[1]
    windows = conv_states[..., : width - 1].unflatten(1, (count, -1))
    before = parts[0].new_zeros(count, slots.shape[0], *weights[0].shape)
    first = _read(slots, has_initial_state)
    copy_states(windows, before.transpose(0, 1)[..., 1:], source_indices=first)
    options: dict[str, Any] = {"activation": activation, "cu_seqlens": offsets}
    ys = [
        short_convolution(x[None], weight, bias, initial_state=state, **options)[0]
        for x, weight, bias, state in zip(parts, weights, biases, before, strict=True)
    ]
    # a row before its sequence is a column of the window
    row = offsets[1:, None] + torch.arange(1 - width, 0, device=slots.device)
    ahead, row = row - offsets[:-1, None], row.clamp(0, parts[0].shape[0] - 1)
    new = torch.stack([x.index_select(0, row.flatten()).unflatten(0, row.shape) for x in parts])
    column = (ahead + width).clamp(0, width - 1).long()[..., None]
    old = before.mT.gather(2, column.expand_as(new))
    after = torch.where(ahead[..., None] < 0, old, new)
    copy_states(after.transpose(0, 1).mT, windows, target_indices=slots)
    return ys


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    core_attn_out: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: str | bool = "auto",
) -> tuple[Tensor, Tensor | None]:
    """chunk_gated_delta_rule of OLMo's layer, and fi_chunk_gated_delta_rule, which writes the state
    after each checkpoint_every_n_tokens tokens of a prompt into state_checkpoints. States are
    [N, HV, V, K]."""
    options: dict[str, Any] = {"scale": scale, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    if state_checkpoints is not None:
        if cu_seqlens is None or checkpoint_every_n_tokens % 64:
            raise NotImplementedError(
                f"checkpoint_every_n_tokens: want a multiple of 64, got {checkpoint_every_n_tokens}"
            )
        options["prefix_states"] = prefix_states.every(
            state_checkpoints, cu_seqlens, q.shape[1], checkpoint_every_n_tokens
        )
    rule = vllm.chunk_gated_delta_rule
    states = initial_state, output_final_state, cu_seqlens
    return rule(q, k, v, g, beta, *states, core_attn_out=core_attn_out, **options)


def chunk_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    raw_g: Tensor | None = None,
    raw_beta: Tensor | None = None,
    A_log: Tensor | None = None,
    g_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """chunk_kda and chunk_kda_with_fused_gate: g and beta are made, or raw. States are
    [N, H, V, K]."""
    expect_none(out=out)
    is_raw = raw_g is not None
    gates, rates = (raw_g if is_raw else g), (beta if raw_beta is None else raw_beta)
    assert gates is not None and rates is not None
    bias = g_bias if is_raw else None
    tensors = q, k, v, gates, rates
    return chunk_kda(
        *tensors,
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=is_raw,
        A_log=A_log.reshape(-1) if is_raw and A_log is not None else None,
        dt_bias=None if bias is None else bias.reshape(-1),
        use_beta_sigmoid_in_kernel=raw_beta is not None,
        safe_gate=safe_gate or (is_raw and lower_bound is not None),
        lower_bound=lower_bound if is_raw else None,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
    )


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    *,
    use_qk_l2norm_in_kernel: bool | None = None,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    safe_gate: bool = False,
    raw_g: Tensor | None = None,
    raw_beta: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    out: Tensor | None = None,
    fuse_gate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """fused_recurrent_gated_delta_rule and fused_recurrent_kda of each release: a token of each
    sequence or drafts, with gates that are made, or raw."""
    if initial_state is None or cu_seqlens is None or ssm_state_indices is None:
        raise NotImplementedError("initial_state: want a pool with blocks, got None")
    if not inplace_final_state:
        raise NotImplementedError("inplace_final_state: want True, the states of the pool move on")
    is_raw = raw_g is not None
    gates, rates = (raw_g if is_raw else g), (beta if raw_beta is None else raw_beta)
    if gates is None or rates is None or use_qk_l2norm_in_kernel is False:
        raise NotImplementedError("use_qk_l2norm_in_kernel: want True, and gates")
    at = ssm_state_indices, cu_seqlens, num_accepted_tokens
    o = vllm.next_tokens(
        *([q, k, v, gates, rates], initial_state, *at),
        A_log=A_log if is_raw else None,
        dt_bias=dt_bias,
        lower_bound=lower_bound if is_raw else None,
        scale=scale,
        use_beta_sigmoid_in_kernel=raw_beta is not None,
    )
    return (o if out is None else out.copy_(o)), initial_state


def mamba_chunk_scan_combined_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor,
    cu_chunk_seqlens: Tensor,
    last_chunk_indices: Tensor,
    seq_idx: Tensor,
    out: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_intermediate_states: bool = False,
    state_dtype: torch.dtype | None = None,
    final_states_out: Tensor | None = None,
    final_state_indices: Tensor | None = None,
) -> Tensor | None:
    """Mamba-2 of packed prompts x [T, H, P] into out; states are [N, H, P, S]."""
    if return_intermediate_states:
        raise NotImplementedError("return_intermediate_states: chunks end where vLLM's do not")
    gates = None if z is None else z[None]
    y, final = serving.mamba2(
        chunk_simple_gla,
        *(x[None], dt[None], A, B[None], C[None], D, gates, dt_bias, dt_softplus, dt_limit),
        initial_state=None if initial_states is None else initial_states.float(),
        output_final_state=True,
        cu_seqlens=cu_seqlens,
    )
    assert final is not None
    out.copy_(y[0])
    if final_states_out is None or final_state_indices is None:
        return final if state_dtype is None else final.to(state_dtype)
    copy_states(final, final_states_out, target_indices=written(final_state_indices, cu_seqlens))
    return None


def selective_scan_fn(
    u: Tensor,
    ssm_states: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_block_id: int = 0,
    block_size: int = 1024,
    block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    cu_chunk_seqlen: Tensor | None = None,
    last_chunk_indices: Tensor | None = None,
) -> Tensor:
    """Mamba-1 of packed prompts u [D, T], B and C [S, T], on a pool [blocks, D, S]."""
    expect_none(
        block_idx_first_scheduled_token=block_idx_first_scheduled_token,
        block_idx_last_scheduled_token=block_idx_last_scheduled_token,
        initial_state_idx=initial_state_idx,
    )
    if query_start_loc is None or cache_indices is None or null_block_id:
        raise NotImplementedError("query_start_loc, cache_indices: want both")
    slots, pool = written(cache_indices, query_start_loc), ssm_states[:, None]
    own = ssm_states.new_empty(slots.shape[0], *ssm_states.shape[1:], dtype=torch.float32)
    copy_states(pool, own[:, None], source_indices=_read(slots, has_initial_state))
    u_, delta_, B_, C_ = (t.mT[None] for t in (u, delta, B, C))
    tensors = u_, delta_, A, B_, C_, D, None if z is None else z.mT[None], delta_bias
    states: dict[str, Any] = {"initial_state": own, "output_final_state": True}
    y, final = selective_scan(*tensors, delta_softplus, cu_seqlens=query_start_loc, **states)
    assert final is not None
    copy_states(final[:, None], pool, target_indices=slots)
    return y[0].mT


def clear_new_sequences(kv_cache: Tensor, state_indices_tensor: Tensor, attn_metadata: Any) -> None:
    """clear_linear_attention_cache_for_new_sequences, without waiting for the device."""
    slots, _, has_initial = _prompts(state_indices_tensor, attn_metadata)
    zeros = kv_cache.new_zeros(slots.shape[0], *kv_cache.shape[1:])
    copy_states(zeros, kv_cache, target_indices=torch.where(has_initial, -1, slots))


def lightning_prefill_and_mix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    state_indices_tensor: Tensor,
    attn_metadata: Any,
    slope_rate: Tensor,
    block_size: int,
    decode_fn: Callable[..., Tensor],
    prefix_fn: Callable[..., Tensor],
    layer_idx: int | None = None,
) -> Tensor:
    """linear_attention_prefill_and_mix: q, k, v [T, H, D], those that decode first; states are
    [blocks, H, K, V]. All prompts in one call."""
    decoded = attn_metadata.num_decode_tokens
    slots, offsets, _ = _prompts(state_indices_tensor, attn_metadata)
    o = serving.prefill(
        chunk_simple_gla,
        *(x[None, decoded : decoded + attn_metadata.num_prefill_tokens] for x in (q, k, v)),
        states=kv_cache.mT,
        slots=slots,
        cu_seqlens=offsets,
        g_gamma=-slope_rate.reshape(-1).to(q.device),
        scale=1.0,
    )[0].flatten(1)
    if not decoded:
        return o
    return torch.cat([decode_fn(q, k, v, kv_cache, state_indices_tensor, attn_metadata), o])


def lightning_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    slope_rate: Tensor,
    state_indices_tensor: Tensor,
    query_start_loc: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    q_start: int = 0,
    q_end: int | None = None,
    slot_start: int = 0,
    slot_end: int | None = None,
    block_size: int = 32,
) -> Tensor:
    """linear_attention_decode and, with query_start_loc, bailing_linear_attention_decode_spec."""
    parts = [x[None, q_start:q_end] for x in (q, k, v)]
    tokens, heads = parts[0].shape[1:3]
    slots = state_indices_tensor[slot_start:slot_end]
    offsets = query_start_loc
    if offsets is None:
        offsets = torch.arange(tokens + 1, device=q.device, dtype=torch.int32)
    gates = -slope_rate.reshape(1, 1, heads).to(q.device).expand(1, tokens, -1)
    o = vllm.next_tokens(
        [*parts, gates],
        kv_cache.mT,
        slots,
        offsets[: slots.shape[0] + 1],
        num_accepted_tokens,
        scale=1.0,
        use_qk_l2norm_in_kernel=False,
    )
    return o[0].flatten(1)


def expect_none(**given: object) -> None:
    """
    Raises:
        NotImplementedError: one of them is not None.
    """
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name}: want None, got {type(value).__name__}")


def _activation(activation: str | bool | None) -> str | None:
    if isinstance(activation, bool):
        return "silu" if activation else None
    if activation not in ACTIVATIONS:
        raise NotImplementedError(f"activation: want one of {ACTIVATIONS}, got {activation!r}")
    return activation


def written(indices: Tensor, offsets: Tensor) -> Tensor:
    """Blocks [N], -1 where there is none, or no token: padding at the end."""
    if indices.dim() != 1:
        raise NotImplementedError(f"cache_indices: want one block a sequence, got {indices.shape}")
    lengths = offsets.diff()
    slots = indices[: lengths.shape[0]]
    return torch.where((slots > 0) & (lengths > 0), slots, -1)


def _read(slots: Tensor, has_initial_state: Tensor | None) -> Tensor:
    if has_initial_state is None:
        return torch.full_like(slots, -1)
    return torch.where(has_initial_state[: slots.shape[0]], slots, -1)


def _prompts(state_indices: Tensor, metadata: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of a batch's prompts: blocks [N], offsets [N + 1], and whether they have a state [N]."""
    first, count = metadata.num_decodes, metadata.num_prefills
    offsets = metadata.query_start_loc[first : first + count + 1]
    lengths = offsets.diff()
    of_prompts = getattr(metadata, "state_indices_tensor_p", None)
    slots = state_indices[first:] if of_prompts is None else of_prompts
    has_initial = metadata.seq_lens[first : first + count] > lengths
    return written(slots[:count], offsets), offsets - offsets[:1], has_initial
