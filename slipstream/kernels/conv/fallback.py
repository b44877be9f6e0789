"""The short convolution in plain torch, as the kernels are called."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common.checks import cast
from slipstream.kernels.conv.eager import convolve
from slipstream.kernels.conv.inputs import UNIT_EPS, UNIT_TENSORS, ConvInputs
from slipstream.runtime.guarded_launch import plain_gradients
from slipstream.runtime.token_ids import expect_below


def convolution(
    inputs: ConvInputs, silu: bool, convolve: Callable[..., Tensor] = convolve
) -> Tensor:
    """y in x's shape and dtype, with gradients."""
    x, weight, bias, residual, state, cu_seqlens = inputs
    compute_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    state = None if state is None else cast(state, compute_dtype)
    taps = cast(weight, compute_dtype)
    y = _finish(convolve(cast(x, compute_dtype), taps, state, cu_seqlens), bias, silu)
    return cast(y if residual is None else y + residual, x.dtype)


def forward(
    inputs: ConvInputs, silu: bool, sizes: Sequence[int] | None = None, unit: int = 0
) -> list[Tensor]:
    """As the launch."""
    y = convolution(inputs, silu)
    tensors = normalised(y, sizes or y.shape[-1:], unit)
    return [channels.contiguous() for channels in tensors]


def normalised(y: Tensor, sizes: Sequence[int], unit: int) -> list[Tensor]:
    """y split into tensors of `sizes` channels. If unit is not 0, heads of `unit` channels of the
    first two tensors are divided by their norms."""
    tensors = [*y.split(list(sizes), -1)]
    if unit:
        tensors[:UNIT_TENSORS] = [_unit(x, unit) for x in tensors[:UNIT_TENSORS]]
    return tensors


def _unit(y: Tensor, unit: int) -> Tensor:
    runs = y.unflatten(-1, (-1, unit)).to(torch.promote_types(y.dtype, torch.float32))
    runs = runs * (runs.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()
    return runs.flatten(-2).to(y.dtype)


def backward(
    dys: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    unit: int = 0,
) -> list[Tensor]:
    """dx, dweight and, where they are there, dbias and dstate."""

    def plain(
        x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None
    ) -> Sequence[Tensor]:
        y = convolution(ConvInputs(x, weight, bias, None, state, cu_seqlens), silu)
        return normalised(y, [dy.shape[-1] for dy in dys], unit)

    inputs = [t for t in (x, weight, bias, state) if t is not None]
    grads = plain_gradients(plain, (x, weight, bias, state), dys)
    return [torch.empty_like(t).copy_(g) for t, g in zip(inputs, grads)]


def update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    indices: Tensor | None,
    silu: bool,
) -> Tensor:
    """x, y [N, D]; the state moves on in place."""
    window, live = _move_on(x, state, indices)
    compute_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    products = cast(window, compute_dtype) * cast(weight, compute_dtype)
    y = _finish(products.sum(-1), bias, silu)
    y = cast(y if residual is None else y + residual, x.dtype)
    return y if live is None else y * live[:, None].to(y.dtype)


def _move_on(token: Tensor, state: Tensor, indices: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The windows [N, D, W] after the token, in place in the state; and who has one."""
    if indices is None:
        window = torch.cat([state[..., 1:], cast(token[..., None], state.dtype)], dim=-1)
        state.copy_(window.detach())
        return window, None
    expect_below("state_indices", indices, state.shape[0], "states")
    live = (indices >= 0) & (indices < state.shape[0])
    cache_slots = indices.long()[live]
    window = token.new_zeros(*token.shape, state.shape[-1], dtype=state.dtype)
    moved = torch.cat([state[cache_slots][..., 1:], token[live][..., None].to(state.dtype)], dim=-1)
    state[cache_slots] = moved.detach()
    return window.masked_scatter(live[:, None, None], moved), live


def _finish(y: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    if bias is not None:
        y = y + bias.to(y.dtype)
    return F.silu(y) if silu else y
