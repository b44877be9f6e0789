"""short_convolution: depthwise, causal, a few taps; and its one-step update."""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.core import checks
from slipstream.core.varlen import check_cu_seqlens_values
from slipstream.kernels.conv import op
from slipstream.kernels.conv.eager import convolve, last_inputs
from slipstream.kernels.conv.reference import conv_reference
from slipstream.kernels.launching import choose_impl


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution along the tokens.

        y_t = f(sum_{j=0..W-1} weight[:, j] x_{t-W+1+j} + bias) + residual_t

    Args:
        x: [B, T, D], any floating dtype; 16-bit inputs are summed in float32.
        weight: [D, W], the last tap on the current token; any floating dtype.
        bias: [D], any floating dtype; None is 0.
        activation: f, "silu" (also "swish") or None for none.
        residual: shape of x; None is 0.
        initial_state: [N, D, W], the last W inputs of each sequence before this call, oldest
            first; None is 0. The oldest is not read.
        output_final_state: also return the state after the last token.
        cu_seqlens: int32 or int64 [N+1], offsets of N sequences packed in B = 1; N = B without.
        impl: None chooses; "eager", "triton" or "reference" is used or refused.

    Returns:
        y in x's shape and dtype, and the final state [N, D, W] in x's dtype, or None.

    Raises:
        ValueError: a shape does not fit, the activation is unknown, or cu_seqlens are no offsets.
        TypeError: not floating, or cu_seqlens not an integer.

    Cost: 2 B T D W flops; the state is W numbers a channel and sequence.
    Source: Poli et al., Hyena Hierarchy, 2023, section 3; calls as in the causal_conv1d package,
        but for the layout [B, T, D].
    """
    checks.expect_rank("x", x, 3, "[B, T, D]")
    _check(x, weight, bias, activation)
    sequences = x.shape[0]
    if cu_seqlens is not None:
        checks.expect_cu_seqlens(cu_seqlens, x.shape[0])
        sequences = cu_seqlens.shape[0] - 1
        if not torch.compiler.is_compiling():
            check_cu_seqlens_values(cu_seqlens, x.shape[1])
    if initial_state is not None:
        checks.expect_shape("initial_state", initial_state, (sequences, *weight.shape))
    if residual is not None:
        checks.expect_shape("residual", residual, x.shape)
    checks.expect_floating({"initial_state": initial_state, "residual": residual})
    given = {"x": x, "residual": residual, "initial_state": initial_state}
    checks.expect_one_device({**given, "cu_seqlens": cu_seqlens})
    impl = choose_impl(impl, x, op.refuses, weight, bias, residual, initial_state, cu_seqlens)
    if impl == "triton":
        silu = activation is not None
        y = op.convolution(x, weight, bias, residual, initial_state, cu_seqlens, silu)
    else:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        state = None if initial_state is None else initial_state.to(wide)
        given = (x.to(wide), weight.to(wide), state, cu_seqlens)
        y = conv_reference(*given)[0] if impl == "reference" else convolve(*given)
        y = _finish(y, bias, activation)
        y = y.to(x.dtype) if residual is None else (y + residual).to(x.dtype)
    if not output_final_state:
        return y, None
    state = None if initial_state is None else initial_state.to(x.dtype)
    return y, last_inputs(x, weight.shape[1], state, cu_seqlens)


def short_convolution_update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    state_indices: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """One token of short_convolution for each of N sequences; the state moves on in place.

    Args:
        x: [N, D] or [N, 1, D], any floating dtype.
        state: [N, D, W], any floating dtype and strides, as short_convolution returns it;
            overwritten. With state_indices a pool [S, D, W].
        weight, bias, activation, residual: as short_convolution; residual in x's shape.
        state_indices: int32 or int64 [N], which state of the pool is each sequence's, none twice;
            below 0 there is none: nothing is written and y is 0.
        impl: as short_convolution; Triton makes no gradients here.

    Returns:
        y in x's shape and dtype. Gradients reach x and weight, not what the state held before.

    Raises:
        ValueError: a shape does not fit, the activation is unknown or, on the CPU, an index is past
            the pool. TypeError: dtypes.

    Cost: 2 N D W flops, one read and write of the state.
    """
    checks.expect_tensor("x", x)
    if x.dim() == 3:
        checks.expect_shape("x", x, (x.shape[0], 1, x.shape[2]))
    else:
        checks.expect_rank("x", x, 2, "[N, D] or [N, 1, D]")
    _check(x, weight, bias, activation)
    slots = x.shape[0]
    if state_indices is not None:
        checks.expect_rank("state", state, 3, "[S, D, W]")
        checks.expect_shape("state_indices", state_indices, x.shape[:1])
        if state_indices.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"state_indices: want int32 or int64, got {state_indices.dtype}")
        slots = state.shape[0]
    checks.expect_shape("state", state, (slots, *weight.shape))
    checks.expect_floating({"state": state, "residual": residual})
    given = {"x": x, "state": state, "residual": residual, "state_indices": state_indices}
    checks.expect_one_device(given)
    if residual is not None:
        checks.expect_shape("residual", residual, x.shape)
    token = x.reshape(x.shape[0], x.shape[-1])
    impl = choose_impl(impl, x, op.refuses_update, weight, bias, residual, state)
    if impl == "triton":
        extra = None if residual is None else residual.reshape(token.shape)
        silu = activation is not None
        return op.update(token, state, weight, bias, extra, state_indices, silu).view(x.shape)
    window, live = _move_on(token, state, state_indices)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = (window.to(wide) * weight.to(wide)).sum(-1).view(x.shape)
    y = _finish(y, bias, activation)
    y = y.to(x.dtype) if residual is None else (y + residual).to(x.dtype)
    return y if live is None else y * live.view(-1, *[1] * (x.dim() - 1)).to(y.dtype)


def _move_on(token: Tensor, state: Tensor, indices: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The windows [N, D, W] after the token, in place in the state; and who has one."""
    if indices is None:
        window = torch.cat([state[..., 1:], token[..., None].to(state.dtype)], dim=-1)
        state.copy_(window.detach())
        return window, None
    live = indices >= 0
    slots = indices.long()[live]
    if indices.device.type == "cpu" and slots.numel() and int(slots.max()) >= state.shape[0]:
        raise ValueError(
            f"state_indices: want less than the {state.shape[0]} states, got {int(slots.max())}"
        )
    window = token.new_zeros(*token.shape, state.shape[-1], dtype=state.dtype)
    moved = torch.cat([state[slots][..., 1:], token[live][..., None].to(state.dtype)], dim=-1)
    state[slots] = moved.detach()
    return window.masked_scatter(live[:, None, None], moved), live


def _finish(y: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y if activation is None else F.silu(y)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    checks.expect_rank("weight", weight, 2, "[D, W]")
    checks.expect_shape("weight", weight, (x.shape[-1], weight.shape[1]))
    if weight.shape[1] < 1:
        raise ValueError("weight: want at least one tap, got shape (D, 0)")
    if bias is not None:
        checks.expect_shape("bias", bias, x.shape[-1:])
    checks.expect_floating({"x": x, "weight": weight, "bias": bias})
    checks.expect_one_device({"x": x, "weight": weight, "bias": bias})
    if activation not in (None, "silu", "swish"):
        raise ValueError(f'activation: want "silu", "swish" or None, got {activation!r}')
