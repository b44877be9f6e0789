"""causal_conv1d.causal_conv1d_interface: the convolution of a sequence and of its next tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common import checks
from slipstream.ops.causal_conv1d import causal_conv1d_fn as convolve
from slipstream.ops.causal_conv1d import causal_conv1d_update as convolve_next


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """slipstream.ops.causal_conv1d_fn by the arguments of causal_conv1d; x [B, D, T] -> [B, D, T],
    or that and the final states [B, D, W-1]."""
    return convolve(
        x,
        weight,
        bias,
        seq_idx,
        initial_states,
        return_final_states,
        final_states_out,
        activation,
    )


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """slipstream.ops.causal_conv1d_update by the arguments of causal_conv1d."""
    return convolve_next(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)


@checks.operator
def causal_conv1d_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
) -> Any:
    """The formula, by torch's own convolution or, with seq_idx, by sums of a sequence's taps."""
    checks.expect_layouts(
        x=(x, "B D T"),
        weight=(weight, "D W"),
        bias=(bias, "D"),
        initial_states=(initial_states, "B D S"),
        final_states_out=(final_states_out, "B D S"),
        seq_idx=(seq_idx, "B T"),
    )
    if seq_idx is not None and return_final_states:
        raise ValueError("seq_idx: returns no states; give return_final_states=False")
    dtype, (D, W) = x.dtype, weight.shape
    before = x.new_zeros(x.shape[0], D, W - 1) if initial_states is None else initial_states
    inputs = torch.cat([before, x], -1)
    if seq_idx is None:
        y = F.conv1d(inputs.to(weight.dtype), weight[:, None], bias, groups=D)
    else:
        index = torch.cat([seq_idx[:, :1].expand(-1, W - 1), seq_idx], -1)
        is_own = index.unfold(-1, W, 1) == seq_idx[..., None]
        taps = inputs.unfold(-1, W, 1) * is_own[:, None] * weight[:, None]
        y = taps.sum(-1) if bias is None else taps.sum(-1) + bias[:, None]
        y = y.masked_fill(seq_idx[:, None] < 0, 0)
    y = (y if activation is None else F.silu(y)).to(dtype)
    if not return_final_states:
        return y
    final = inputs[..., inputs.shape[-1] - (W - 1) :].to(dtype)
    return y, final if final_states_out is None else final_states_out.copy_(final)


@checks.operator
def causal_conv1d_update_ref(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
) -> Tensor:
    """The formula, by torch's own convolution; conv_state is updated in place."""
    checks.expect_layouts(
        x=(x, "B D T" if x.dim() == 3 else "B D"),
        conv_state=(conv_state, "B D S"),
        weight=(weight, "D W"),
        bias=(bias, "D"),
        cache_seqlens=(cache_seqlens, "B"),
    )
    if cache_seqlens is not None and cache_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cache_seqlens: want int32 or int64, got {cache_seqlens.dtype}")
    dtype, D, S = x.dtype, weight.shape[0], conv_state.shape[2]
    tokens = x if x.dim() == 3 else x[..., None]
    T = tokens.shape[2]
    # places of the S inputs before and of the S newest ones, oldest first
    steps = torch.arange(-S, 0, device=x.device)
    start = 0 if cache_seqlens is None else cache_seqlens[:, None, None]
    places = torch.remainder(start + steps, S).expand_as(conv_state)
    inputs = torch.cat([conv_state.gather(2, places), tokens], -1)
    moved = 0 if cache_seqlens is None else T
    conv_state.scatter_(2, torch.remainder(places + moved, S), inputs[..., -S:])
    y = F.conv1d(inputs.to(weight.dtype), weight[:, None], bias, groups=D)[..., -T:]
    return (y if activation is None else F.silu(y)).to(dtype).view(x.shape)
