"""The calls of the causal_conv1d package: channels before tokens, state of any length."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.ops.conv import short_convolution, short_convolution_update
from slipstream.runtime.token_ids import expect_below, expect_offsets

# arguments of vLLM's functions of these names, and of circular states
NOT_IMPLEMENTED = (
    "cache_seqlens",
    "block_idx_first_scheduled_token",
    "block_idx_last_scheduled_token",
    "cache_indices",
    "conv_states",
    "has_initial_state",
    "initial_state_idx",
    "intermediate_conv_window",
    "max_query_len",
    "metadata",
    "num_accepted_tokens",
    "num_computed_tokens",
    "pad_slot_id",
    "query_start_loc",
    "retrieve_next_sibling",
    "retrieve_next_token",
    "retrieve_parent_token",
)


@checks.operator
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    *,
    query_start_loc: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str | None = None,
    **kwargs: Any,
) -> Any:
    """short_convolution of x [B, D, T], as causal_conv1d.causal_conv1d_fn.

    Args:
        x: [B, D, T]; with strides of a transposed [B, T, D] nothing is copied. With offsets also
            [D, T].
        weight: [D, W]. bias: [D].
        seq_idx: int32 or int64 [B, T], which of the sequences packed in a row a token belongs to,
            a sequence's tokens side by side; negative for padding, whose y is 0.
        initial_states: [N, D, W-1], the inputs before the first, oldest first; N = B without
            offsets. With seq_idx those of each row's first sequence, as in causal_conv1d 1.7.
        return_final_states: also return the last W-1 inputs, [N, D, W-1]; not with seq_idx.
        final_states_out: where these are written; only with return_final_states.
        activation: None, "silu" or "swish".
        query_start_loc, cu_seqlens: two names of the offsets [N+1], int32 or int64, of N sequences
            packed in B = 1.
        impl: as short_convolution.
        kwargs: other known arguments; they have to be None.

    Returns:
        x's shape, or a pair with the final states.

    Raises:
        ValueError: shapes do not fit, or seq_idx comes with final states or offsets. TypeError:
            dtypes, or an argument that is not known. NotImplementedError: one of vLLM's.
    """
    _refuse("causal_conv1d_fn", kwargs)
    if final_states_out is not None and not return_final_states:
        raise ValueError("final_states_out: want return_final_states=True beside it")
    offsets = "cu_seqlens"
    checks.expect_rank("weight", weight, 2, "[D, W]")
    if query_start_loc is not None:
        if cu_seqlens is not None:
            raise ValueError("query_start_loc, cu_seqlens: want one of them, got both")
        cu_seqlens, offsets = query_start_loc, "query_start_loc"
    if cu_seqlens is not None and x.dim() == 2:
        y = causal_conv1d_fn(
            x[None], weight, bias, seq_idx, initial_states, return_final_states, final_states_out,
            activation, query_start_loc=query_start_loc, impl=impl,
            cu_seqlens=cu_seqlens if query_start_loc is None else None,
        )  # fmt: skip
        return (y[0][0], y[1]) if return_final_states else y[0]
    checks.expect_rank("x", x, 3, "[B, D, T]")
    B, D, T = x.shape
    W = weight.shape[1]
    N = B
    options: dict[str, Any] = {"activation": activation, "impl": impl}
    if seq_idx is not None:
        if return_final_states:
            raise ValueError("seq_idx: returns no states; give cu_seqlens in its place")
        if cu_seqlens is not None:
            raise ValueError("seq_idx, cu_seqlens: want one of them, got both")
        _expect_index("seq_idx", seq_idx, (B, T), x)
        rows = x.mT.reshape(1, B * T, D)
        y, _ = short_convolution(rows, weight, bias, cu_seqlens=_offsets(seq_idx), **options)
        y = y.view(B, T, D)
        if initial_states is not None:
            before = _padded(initial_states, (B, D, W - 1), x)
            # a row that begins with padding reads none: of NaN gradients would be NaN too
            before = before.masked_fill((seq_idx < 0)[:, :1].any(1)[:, None, None], 0)
            # the W-1 tokens that a state reaches, and of these the first sequence's
            early = x[..., : W - 1].mT
            begun, _ = short_convolution(early, weight, bias, initial_state=before, **options)
            n = early.shape[1]
            is_first = (seq_idx[:, :n] == seq_idx[:, :1])[..., None]
            y = torch.cat([torch.where(is_first, begun, y[:, :n]), y[:, n:]], 1)
        return y.masked_fill((seq_idx < 0)[..., None], 0).mT
    if cu_seqlens is not None:
        checks.expect_cu_seqlens(cu_seqlens, B, T, name=offsets)
        checks.expect_one_device({"x": x, offsets: cu_seqlens})
        if not torch.compiler.is_compiling():
            expect_offsets(offsets, cu_seqlens, T)
        N = cu_seqlens.shape[0] - 1
    y, state = short_convolution(
        x.mT,
        weight,
        bias,
        initial_state=None if initial_states is None else _padded(initial_states, (N, D, W - 1), x),
        output_final_state=return_final_states,
        cu_seqlens=cu_seqlens,
        **options,
    )
    if state is None:
        return y.mT
    final = state[..., 1:]
    if final_states_out is not None:
        checks.expect_shape("final_states_out", final_states_out, (N, D, W - 1))
        checks.expect_floating({"final_states_out": final_states_out})
        checks.expect_one_device({"x": x, "final_states_out": final_states_out})
        final = final_states_out.copy_(final)
    return y.mT, final


def _padded(initial_states: Tensor, shape: Sequence[int], x: Tensor) -> Tensor:
    """Returns states as short_convolution has them: W inputs, whose oldest is not read."""
    checks.expect_shape("initial_states", initial_states, shape)
    checks.expect_floating({"initial_states": initial_states})
    checks.expect_one_device({"x": x, "initial_states": initial_states})
    return torch.nn.functional.pad(initial_states, (1, 0))


def _offsets(seq_idx: Tensor) -> Tensor:
    """cu_seqlens [B T + 1] of all rows in one, the sequences that are not there empty at the end:
    how many there are is not known without waiting for the device."""
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    total = seq_idx.numel()
    places = torch.arange(total, device=seq_idx.device)
    begins = torch.where(starts.flatten(), places, total).sort().values
    return torch.nn.functional.pad(begins, (0, 1), value=total)


@checks.operator
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    *,
    pad_slot_id: int | None = None,
    impl: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """The next tokens of each sequence, as causal_conv1d.causal_conv1d_update.

    Args:
        x: [B, D], or [B, D, T] for T tokens, one after the other.
        conv_state: [B, D, S] or, with conv_state_indices, a pool of them; the last inputs, oldest
            first, S at least W - 1. It is updated in place.
        weight: [D, W]. bias: [D].
        activation: None, "silu" or "swish".
        cache_seqlens: None: the newest input comes last, and states are not circular.
        conv_state_indices: int32 or int64 [B], which state of the pool is each sequence's; negative
            where there is none: nothing is read or written, and y is 0.
        pad_slot_id: an index that means the same as a negative one.
        impl: as short_convolution_update.
        kwargs: other known arguments; they have to be None.

    Returns:
        x's shape.

    Raises:
        ValueError: shapes do not fit or, on the CPU, an index is past the pool. TypeError: dtypes,
            or an argument that is not known. NotImplementedError: cache_seqlens, or one of vLLM's.
    """
    _refuse("causal_conv1d_update", {"cache_seqlens": cache_seqlens, **kwargs})
    checks.expect_rank("conv_state", conv_state, 3, "[B, D, S]")
    checks.expect_rank("weight", weight, 2, "[D, W]")
    if x.dim() != 3:
        checks.expect_rank("x", x, 2, "[B, D] or [B, D, T]")
    W, S = weight.shape[1], conv_state.shape[2]
    if S < W - 1:
        raise ValueError(f"conv_state: want at least {W - 1} inputs of a channel, got {S}")
    checks.expect_shape("conv_state", conv_state, (conv_state.shape[0], x.shape[1], S))
    checks.expect_floating({"conv_state": conv_state})
    checks.expect_own_memory("conv_state", conv_state)
    checks.expect_one_device({"x": x, "conv_state": conv_state})
    slots = conv_state.shape[0]
    if conv_state_indices is None:
        checks.expect_shape("conv_state", conv_state, (x.shape[0], *conv_state.shape[1:]))
    else:
        _expect_index("conv_state_indices", conv_state_indices, x.shape[:1], x)
        if pad_slot_id is not None and pad_slot_id >= 0:
            conv_state_indices = conv_state_indices.masked_fill(
                conv_state_indices == pad_slot_id, -1
            )
        expect_below("conv_state_indices", conv_state_indices, slots, "states")
    if x.dim() == 3:
        tokens = [
            _step(token, conv_state, weight, bias, activation, conv_state_indices, impl)
            for token in x.clone().unbind(2)  # it may be a part of the state
        ]
        return torch.stack(tokens, -1) if tokens else x.clone()
    return _step(x, conv_state, weight, bias, activation, conv_state_indices, impl)


def _step(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    indices: Tensor | None,
    impl: str | None,
) -> Tensor:
    """Computes one token, x [B, D]."""
    W, (slots, _, S) = weight.shape[1], conv_state.shape
    options: dict[str, Any] = {"activation": activation, "state_indices": indices, "impl": impl}
    if S == W:
        return short_convolution_update(x, conv_state, weight, bias, **options)
    # the window moves on; what is older than it moves too, or there is one input less
    window = conv_state[..., -W:] if S > W else torch.nn.functional.pad(conv_state, (1, 0))
    older = conv_state[..., 1 : S - W + 1].clone() if S > W else None
    window = window.clone()
    y = short_convolution_update(x, window, weight, bias, **options)
    if indices is None or older is None:
        conv_state[..., -W if S > W else 0 :] = window[..., -S:]
        if older is not None:
            conv_state[..., : S - W] = older
        return y
    touched = torch.zeros(slots + 1, dtype=torch.bool, device=x.device)
    missing = (indices < 0) | (indices >= slots)
    touched[indices.long().masked_fill(missing, slots)] = True
    older = torch.where(touched[:-1, None, None], older, conv_state[..., : S - W])
    conv_state.copy_(torch.cat([older, window], -1))
    return y


def _expect_index(name: str, x: Tensor, shape: Sequence[int], like: Tensor) -> None:
    checks.expect_shape(name, x, shape)
    checks.expect_one_device({"x": like, name: x})
    checks.expect_index(name, x)


def _refuse(fn: str, kwargs: dict[str, Any]) -> None:
    """Arguments that would change the result, unless they are None."""
    for name, value in kwargs.items():
        if value is None:
            continue
        if name in NOT_IMPLEMENTED:
            raise NotImplementedError(f"{name}: {fn} does not implement it, got {value!r}")
        raise TypeError(f"{name}: {fn} has no such argument, got {value!r}")
