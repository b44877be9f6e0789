"""The short convolution as a formula, the oracle of the tests, and in fast plain torch.

    y    = correlate(padded, weight)              padded: W - 1 rows of the past, then the sequence
    dx   = correlate(dy between zeros, weight reversed)
    dw_j = sum_t padded_{t+j} dy_t

Packed sequences are laid out with W - 1 rows before each, holding its past, so that one dense
correlation never mixes two of them: token t of sequence n is row t + (n + 1)(W - 1).

On the CPU the correlation is torch's channels-last depthwise convolution, 3.4 times as fast as W
shifted multiply-adds at [8, 256, 768] on one core (0.54 ms to 1.84), and dw goes through blocks of
rows that stay in the cache, 5.4 times as fast as W passes (1.31 ms to 7.09).

    y_t[d] = sum_{j=0..W-1} weight[d, j] x_{t-W+1+j}[d]        x before the start: initial_state

Symbols: B batch, T tokens, D channels, W taps, N sequences. A state holds the last W inputs of its
sequence, oldest first; the oldest is not read again, it is kept because the field's caches have W.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common import checks, varlen
from slipstream.kernels.conv.inputs import (
    UNIT_EPS,
    UNIT_TENSORS,
    ConvInputs,
    GradInputs,
    UpdateInputs,
)
from slipstream.runtime import autograd, guarded_launch, token_ids
from slipstream.runtime.autograd import Function, Saved, by_operation, once_differentiable, save


def conv_reference(
    x: Tensor, weight: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns y [B, T, D] and the final state [N, D, W], sequence by sequence."""
    return varlen.by_sequence(partial(_run, weight), (x,), initial_state, cu_seqlens)


def _run(weight: Tensor, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    width = weight.shape[1]
    if state is None:
        past = F.pad(x, (0, 0, width, 0))  # [B, W + T, D]
    else:
        past = torch.cat([state.mT, x], dim=1)
    y = correlate_reference(past[:, 1:], weight)
    return y, past[:, past.shape[1] - width :].mT


def correlate_reference(padded: Tensor, weight: Tensor) -> Tensor:
    """padded [B, R, D] with R >= W - 1, weight [D, W] -> [B, R - W + 1, D]."""
    width = weight.shape[1]
    rows = padded.shape[1] - width + 1
    y = padded[:, :rows] * weight[:, 0]
    for j in range(1, width):
        y = y + padded[:, j : j + rows] * weight[:, j]
    return y


# rows whose products with all taps are in memory at once
BLOCK_ROWS = 64


class Positions(NamedTuple):
    """token [T]: padded row of each token; past [N, W - 1]: rows of what comes before sequence n.

    source [R]: token of each padded row, 0 at the rows of the past.
    """

    token: Tensor
    past: Tensor
    source: Tensor


def positions(cu_seqlens: Tensor, tokens: int, width: int) -> Positions:
    begin = varlen.bounded_offsets(cu_seqlens, tokens)
    n = torch.arange(begin.shape[0] - 1, device=begin.device)
    t = torch.arange(tokens, device=begin.device)
    token = t + (torch.searchsorted(begin[1:], t, right=True) + 1) * (width - 1)
    past = (begin[:-1] + n * (width - 1))[:, None] + torch.arange(width - 1, device=begin.device)
    source = t.new_zeros(tokens + past.numel()).index_copy(0, token, t)
    return Positions(token, past, source)


def convolve(
    x: Tensor, weight: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """x [B, T, D], weight [D, W], initial_state [N, D, W], all float32 or float64 -> [B, T, D]."""
    width = weight.shape[1]
    past = None  # [N, W - 1, D]
    if initial_state is not None:
        past = initial_state[..., 1:].mT
    if cu_seqlens is None:
        if past is None:
            past = x.new_zeros(x.shape[0], width - 1, x.shape[2])
        return _correlate(torch.cat([past, x], dim=1), weight)
    where = positions(cu_seqlens, x.shape[1], width)
    y = _correlate(_spread(x[0], past, *where)[None], weight)[0]
    # row i ends its window at padded row i + W - 1
    return y.index_select(0, where.token - (width - 1))[None]


def last_inputs(
    x: Tensor, width: int, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """The final state [N, D, W]: the last W of the initial state's and the sequence's inputs."""
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is None:
        if cu_seqlens is None and x.shape[1] >= width:
            return x[:, x.shape[1] - width :].mT.contiguous()
        initial_state = x.new_zeros(sequences, x.shape[2], width)
    if cu_seqlens is None:
        return torch.cat([initial_state, x[:, max(x.shape[1] - width, 0) :].mT], 2)[..., -width:]
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    age = torch.arange(-width, 0, device=x.device)  # of the state's columns, from the end
    row = end[:, None] + age  # [N, W]
    in_sequence = (row >= begin[:, None])[..., None]
    # a column older than the sequence comes from the state, as far from its end as it is too old
    column = (row - begin[:, None] + width).clamp(0, width - 1)[..., None]
    old = initial_state.mT.gather(1, column.expand(-1, -1, x.shape[2]))  # [N, W, D]
    if x.shape[1] == 0:
        return old.mT
    new = x[0].index_select(0, row.clamp(0, x.shape[1] - 1).flatten()).view_as(old)
    return torch.where(in_sequence, new, old).mT


def _correlate(padded: Tensor, weight: Tensor) -> Tensor:
    if by_operation():
        return correlate_reference(padded, weight)
    if autograd.wants_gradient(padded, weight):
        return _Correlate.apply(padded, weight)
    return _dense(padded, weight, 0).data


class _Correlate(Function):
    operator = "slipstream::short_convolution"

    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor) -> Tensor:
        save(ctx, padded, weight)
        # not a view, which could not be changed in place
        return _dense(padded, weight, 0).data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        padded, weight = saved
        needs_x, needs_weight = ctx.needs_input_grad
        dx = None
        if needs_x:  # of fewer rows than taps, where there is no dy, a gradient of as many
            dx = _dense(dy, weight.flip(1), weight.shape[1] - 1)[:, : padded.shape[1]]
        return dx, _dweight(padded, dy, weight) if needs_weight else None


def _dense(x: Tensor, weight: Tensor, pad: int) -> Tensor:
    """Correlation of x with `pad` rows of zeros on both sides."""
    rows = x.shape[1] + 2 * pad - weight.shape[1] + 1
    # oneDNN has no float64, and cuDNN would round to tf32
    if x.dtype != torch.float32 or not x.is_cpu or x.numel() == 0 or rows == 0:
        return correlate_reference(F.pad(x, (0, 0, pad, pad)), weight)
    image = x.unsqueeze(1).permute(0, 3, 1, 2)  # [B, D, 1, R], channels last in memory
    with torch.autocast("cpu", enabled=False):
        y = F.conv2d(image, weight[:, None, None], padding=(0, pad), groups=weight.shape[0])
    return y.permute(0, 2, 3, 1)[:, 0]


def _dweight(padded: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    channels, width = weight.shape
    rows = dy.shape[1]
    if not padded.is_cpu or rows < BLOCK_ROWS // 4:
        taps = [(padded[:, j : j + rows] * dy).sum((0, 1)) for j in range(width)]
        return torch.stack(taps, dim=1)
    dw = weight.new_zeros(width, channels)
    for past, d in zip(padded, dy):
        stride = past.stride()
        for i, block in enumerate(d.split(BLOCK_ROWS)):  # [R, D]
            size = (width, *block.shape)
            offset = past.storage_offset() + i * BLOCK_ROWS * stride[0]
            dw += (past.as_strided(size, (stride[0], *stride), offset) * block).sum(1)
    return dw.t()


def _spread(
    x: Tensor, past: Tensor | None, token: Tensor, before: Tensor, source: Tensor
) -> Tensor:
    """Tokens x [T, D] and past [N, W - 1, D], or zeros, to their padded rows [R, D]."""
    if x.shape[0] == 0:
        padded = F.pad(x, (0, 0, 0, source.shape[0]))
    else:
        padded = x.index_select(0, source).index_fill(0, before.flatten(), 0)
    return padded if past is None else padded.index_copy(0, before.flatten(), past.flatten(0, 1))


def convolution(
    inputs: ConvInputs, silu: bool, convolve: Callable[..., Tensor] = convolve
) -> Tensor:
    """y in x's shape and dtype, with gradients."""
    x, weight, bias, residual, state, cu_seqlens = inputs
    compute_dtype = checks.wide_dtype(x)
    state = None if state is None else checks.cast(state, compute_dtype)
    taps = checks.cast(weight, compute_dtype)
    y = _finish(convolve(checks.cast(x, compute_dtype), taps, state, cu_seqlens), bias, silu)
    return checks.cast(y if residual is None else y + residual, x.dtype)


def forward(inputs: ConvInputs, sizes: Sequence[int] | None, unit: int, silu: bool) -> list[Tensor]:
    """As the launch."""
    y = convolution(inputs, silu)
    return normalised(y, sizes or y.shape[-1:], unit)


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


def backward(t: GradInputs, unit: int, silu: bool) -> list[Tensor]:
    """dx, dweight and, where they are there, dbias and dstate."""
    dys, (x, weight, bias, state, cu_seqlens) = t.dys(), t[3:]

    def plain(x: Tensor, weight: Tensor, *others: Tensor | None) -> Sequence[Tensor]:
        bias, state = others
        y = convolution(ConvInputs(x, weight, bias, None, state, cu_seqlens), silu)
        return normalised(y, [dy.shape[-1] for dy in dys], unit)

    grads = guarded_launch.plain_gradients(plain, (x, weight, bias, state), dys)
    # as the launch's: none is a view with an offset
    inputs = [t for t in (x, weight, bias, state) if t is not None]
    return [torch.empty_like(t).copy_(g) for t, g in zip(inputs, grads)]


def update(t: UpdateInputs, silu: bool) -> Tensor:
    """y [N, D]; the state moves on in place."""
    x, state, weight, bias, residual, indices = t
    window, live = _move_on(x, state, indices)
    compute_dtype = checks.wide_dtype(x)
    products = checks.cast(window, compute_dtype) * checks.cast(weight, compute_dtype)
    y = _finish(products.sum(-1), bias, silu)
    y = checks.cast(y if residual is None else y + residual, x.dtype)
    return y if live is None else y * live[:, None].to(y.dtype)


def _move_on(token: Tensor, state: Tensor, indices: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The windows [N, D, W] after the token, in place in the state; and who has one."""
    if indices is None:
        window = torch.cat([state[..., 1:], checks.cast(token[..., None], state.dtype)], dim=-1)
        state.copy_(window.detach())
        return window, None
    token_ids.expect_below("state_indices", indices, state.shape[0], "states")
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
