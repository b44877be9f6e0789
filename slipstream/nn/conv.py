"""The short convolution with its state."""

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.common.checks import expect_tensor
from slipstream.nn.linear import is_hooked
from slipstream.ops import conv, norm
from slipstream.runtime import consistent, context_parallel


class ShortConvolution(nn.Module):
    """A depthwise causal convolution over `width` tokens, an activation, and its state.

    weight [D, W] and bias [D] are those of torch.nn.Conv1d(D, D, W, groups=D), whose state dict
    (weight [D, 1, W]) it loads.

    Args:
        channels: D. width: W, taps. bias: whether there is one.
        activation: "silu", or None for none.
    """

    def __init__(
        self, channels: int, width: int = 4, bias: bool = False, activation: str | None = "silu"
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.channels, self.width, self.activation = channels, width, activation
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        context: context_parallel.ContextParallel | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, T, D], state [N, D, W] or None -> y [B, T, D] and the next state, if wanted."""
        expect_tensor("x", x)
        if state is not None:
            expect_tensor("state", state)
        step = consistent.consistent_scope.step
        if step is not None and state is not None:
            window = step.window(x, state)
            if window is not None:
                given = x, window, self.weight, self.bias
                return conv.short_convolution_update(*given, activation=self.activation), window
        one = x.shape[1] == 1 and cu_seqlens is None and context is None
        if one and state is not None and use_cache and not torch.is_grad_enabled():
            state = state.clone()
            y = conv.short_convolution_update(
                x, state, self.weight, self.bias, activation=self.activation
            )
            return y, state
        self._leave_windows(x, state, use_cache)
        return conv.short_convolution(
            x,
            self.weight,
            self.bias,
            activation=self.activation,
            initial_state=state,
            output_final_state=use_cache,
            cu_seqlens=cu_seqlens,
            context=context,
        )

    def split(
        self,
        x: Tensor,
        sizes: tuple[int, int, int],
        state: Tensor | None = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
        context: context_parallel.ContextParallel | None = None,
        unit: int = 0,
    ) -> tuple[list[Tensor], Tensor | None]:
        """As a call, with y in three tensors [B, T, n], n of sizes; unit: as split_convolution."""
        one = x.shape[1] == 1 and not torch.is_grad_enabled()
        if is_hooked(self) or one or torch.compiler.is_compiling():
            y, after = self(x, state, use_cache, cu_seqlens, context)
            parts = [*y.split(sizes, -1)]
            if not unit:
                return parts, after
            if not one:
                return conv.unit_heads(parts, unit), after
            queries, keys, _ = sizes  # in one launch
            heads = norm.l2_norm(y[..., : queries + keys].unflatten(-1, (-1, unit))).flatten(-2)
            return [*heads.split((queries, keys), -1), *parts[2:], *parts[:2]], after
        step = consistent.consistent_scope.step
        if step is not None and state is not None:
            step.window(x, state)  # for the steps after this block
        self._leave_windows(x, state, use_cache)
        return conv.split_convolution(
            x,
            self.weight,
            self.bias,
            sizes,
            activation=self.activation,
            initial_state=state,
            output_final_state=use_cache,
            cu_seqlens=cu_seqlens,
            context=context,
            unit=unit,
        )

    def _leave_windows(self, x: Tensor, state: Tensor | None, use_cache: bool) -> None:
        if consistent.prefix_scope.prefixes is not None and use_cache:
            consistent.prefix_scope.prefixes.add_windows(x, state, self.width)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        name = f"{prefix}weight"
        weight = state_dict.get(name)
        if weight is not None and weight.dim() == 3 and weight.shape[1] == 1:
            state_dict[name] = weight[:, 0]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.channels}, width={self.width}, activation={self.activation!r}"
