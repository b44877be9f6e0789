"""The calls of the causal_conv1d package: channels before tokens, state of any length."""

from typing import Any

import torch
from torch import Tensor

from slipstream.core import checks
from slipstream.ops.conv import short_convolution, short_convolution_update


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Any:
    """short_convolution of x [B, D, T], as causal_conv1d.causal_conv1d_fn.

    Args:
        x: [B, D, T]; with strides of a transposed [B, T, D] nothing is copied.
        weight: [D, W]. bias: [D].
        seq_idx: int32 or int64 [B, T], which of the sequences packed in a row a token belongs to,
            not falling; not together with states.
        initial_states: [B, D, W-1], the inputs before the first, oldest first.
        return_final_states: also return the last W-1 inputs, [B, D, W-1].
        final_states_out: where these are written.
        activation: None, "silu" or "swish".
        kwargs: impl, as short_convolution; others are not looked at.

    Returns:
        [B, D, T], or a pair with the final states.

    Raises:
        ValueError: shapes do not fit, or seq_idx comes with states. TypeError: dtypes.
    """
    checks.expect_rank("x", x, 3, "[B, D, T]")
    checks.expect_rank("weight", weight, 2, "[D, W]")
    B, D, T = x.shape
    W = weight.shape[1]
    options = {"activation": activation, "impl": kwargs.get("impl")}
    if seq_idx is not None:
        if initial_states is not None or return_final_states:
            raise ValueError("seq_idx: packed sequences have no states here; use short_convolution")
        checks.expect_shape("seq_idx", seq_idx, (B, T))
        rows = x.mT.reshape(1, B * T, D)
        y, _ = short_convolution(rows, weight, bias, cu_seqlens=_offsets(seq_idx), **options)
        return y.view(B, T, D).mT
    if initial_states is not None:
        checks.expect_shape("initial_states", initial_states, (B, D, W - 1))
        # the oldest of the W inputs that a state has is not read
        initial_states = torch.nn.functional.pad(initial_states, (1, 0))
    y, state = short_convolution(
        x.mT,
        weight,
        bias,
        initial_state=initial_states,
        output_final_state=return_final_states,
        **options,
    )
    if state is None:
        return y.mT
    final = state[..., 1:]
    if final_states_out is not None:
        checks.expect_shape("final_states_out", final_states_out, (B, D, W - 1))
        final = final_states_out.copy_(final)
    return y.mT, final


def _offsets(seq_idx: Tensor) -> Tensor:
    """cu_seqlens [B T + 1] of all rows in one, the sequences that are not there empty at the end:
    how many there are is not known without waiting for the device."""
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    total = seq_idx.numel()
    places = torch.arange(total, device=seq_idx.device)
    begins = torch.where(starts.flatten(), places, total).sort().values
    return torch.nn.functional.pad(begins, (0, 1), value=total)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The next tokens of each sequence, as causal_conv1d.causal_conv1d_update.

    Args:
        x: [B, D], or [B, D, T] for T tokens, one after the other.
        conv_state: [B, D, S] or, with conv_state_indices, a pool of them; the last inputs, oldest
            first, S at least W - 1. It moves on in place.
        weight: [D, W]. bias: [D].
        activation: None, "silu" or "swish".
        cache_seqlens: None; a state that goes round is not known here.
        conv_state_indices: [B], which state of the pool is each sequence's.
        kwargs: impl, as short_convolution_update; others are not looked at.

    Returns:
        x's shape.

    Raises:
        ValueError: shapes do not fit. NotImplementedError: cache_seqlens is given.
    """
    if cache_seqlens is not None:
        raise NotImplementedError("cache_seqlens: roll the state, the newest input comes last")
    checks.expect_rank("conv_state", conv_state, 3, "[B, D, S]")
    checks.expect_rank("weight", weight, 2, "[D, W]")
    W, S = weight.shape[1], conv_state.shape[2]
    if S < W - 1:
        raise ValueError(f"conv_state: want at least {W - 1} inputs of a channel, got {S}")
    checks.expect_tensor("x", x)
    if x.dim() == 3:
        tokens = [
            causal_conv1d_update(
                x[..., t], conv_state, weight, bias, activation,
                conv_state_indices=conv_state_indices, **kwargs,
            )
            for t in range(x.shape[2])
        ]  # fmt: skip
        return torch.stack(tokens, -1) if tokens else x.clone()
    options = {"activation": activation, "state_indices": conv_state_indices}
    options["impl"] = kwargs.get("impl")
    if S == W:
        return short_convolution_update(x, conv_state, weight, bias, **options)
    # the window moves on; what is older than it moves too, or there is one input less
    window = conv_state[..., -W:] if S > W else torch.nn.functional.pad(conv_state, (1, 0))
    older = conv_state[..., 1 : S - W + 1].clone() if S > W else None
    window = window.clone()
    y = short_convolution_update(x, window, weight, bias, **options)
    if conv_state_indices is None or older is None:
        conv_state[..., -W if S > W else 0 :] = window[..., -S:]
        if older is not None:
            conv_state[..., : S - W] = older
        return y
    touched = torch.zeros(conv_state.shape[0] + 1, dtype=torch.bool, device=x.device)
    touched[torch.where(conv_state_indices < 0, conv_state.shape[0], conv_state_indices)] = True
    older = torch.where(touched[:-1, None, None], older, conv_state[..., : S - W])
    conv_state.copy_(torch.cat([older, window], -1))
    return y
