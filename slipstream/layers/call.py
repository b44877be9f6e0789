"""The arguments of a layer's call besides its tokens, and what layers derive from them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.nn import decoding, linear
from slipstream.nn.conv import ShortConvolution
from slipstream.ops.conv import split_convolution, unit_heads
from slipstream.ops.rotary import packed_positions
from slipstream.runtime.context_parallel import ContextParallel
from slipstream.runtime.prefix_tree import PrefixTree

State = dict[str, Tensor]
Mixed = tuple[Tensor, State | None]
Parts = tuple[list[Tensor], Tensor | None]


class MixerCall(NamedTuple):
    """The options of Mixer.forward; layers/base.py says what each is."""

    cu_seqlens: Tensor | None = None
    context: ContextParallel | None = None
    positions: Tensor | None = None
    state: State | None = None
    use_cache: bool = False

    def past(self, name: str) -> Tensor | None:
        return None if self.state is None else self.state[name]

    def pasts(self, *names: str) -> tuple[Tensor, ...] | None:
        return None if self.state is None else tuple(self.state[name] for name in names)

    def sequence(self, initial_state: Any) -> dict[str, Any]:
        """The arguments of the same names that all operators of the linear family have."""
        return {
            "initial_state": initial_state,
            "output_final_state": self.use_cache,
            "cu_seqlens": self.cu_seqlens,
            "context": self.context,
        }

    def new_state(self, **tensors: Tensor | None) -> State | None:
        """The next state, of what the operators returned."""
        if not self.use_cache:
            return None
        return {name: x for name, x in tensors.items() if x is not None}

    def next_lengths(self, x: Tensor) -> Tensor:
        """Number of tokens that each sequence has after this call, int64 [N]."""
        if self.cu_seqlens is None:
            here = torch.full((x.shape[0],), x.shape[1], device=x.device)
        else:
            here = self.cu_seqlens.diff().long()
        return here if self.state is None else here + self.state["length"]

    def token_positions(self, x: Tensor) -> Tensor:
        """The place of each token in its sequence, int64 [1 or B, T]."""
        if self.positions is not None:
            return self.positions
        if self.context is not None:
            return self.context.share(x.shape[1]).positions(x.device)
        start = self.past("length")
        if self.cu_seqlens is not None and start is None:
            return decoding.packed_positions(self.cu_seqlens, x.shape[1])
        if self.cu_seqlens is not None:
            return packed_positions(self.cu_seqlens, x.shape[1], offsets=start)
        at = decoding.first_positions(x.shape[1], x.device)
        return at if start is None else at + start[:, None]

    def tables(self, x: Tensor, dim: int, base: float) -> tuple[Tensor, Tensor]:
        """cos and sin of each token's place, as decoding.tables has them."""
        if self.positions is self.context is self.cu_seqlens is self.past("length") is None:
            return decoding.first_tables(x, dim, base)
        return decoding.tables(self.token_positions(x), dim, base, x.dtype)

    def convolved(self, conv: ShortConvolution | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The convolution and its next state; without a convolution its activation alone."""
        if conv is None:
            return F.silu(x), None
        return conv(x, self.past("conv"), self.use_cache, self.cu_seqlens, self.context)

    def convolved_together(
        self, conv: ShortConvolution | None, *xs: Tensor
    ) -> tuple[Sequence[Tensor], Tensor | None]:
        """`convolved` of xs as one tensor, in parts again; without a convolution xs."""
        if conv is None:
            return xs, None
        y, after = self.convolved(conv, torch.cat(xs, dim=-1))
        return y.split([x.shape[-1] for x in xs], dim=-1), after

    def convolution_in_parts(
        self, conv: ShortConvolution | None, x: Tensor, sizes: tuple[int, int, int], unit: int = 0
    ) -> tuple[Callable[[Tensor], Parts], int]:
        """A function that convolves x as `convolved` does, with y in three tensors, and the number
        of elements for Recompute, 0 where the function must not be called again.

        sizes: channels of the three tensors. unit: as split_convolution. The weight, bias and state
        are read here, not in the function, because the module may have others by the time of the
        backward.
        """
        _, context, _, _, use_cache = self
        once = use_cache or not (context is None or isinstance(context, PrefixTree))
        if conv is None:

            def activate(x: Tensor) -> Parts:
                parts = [*F.silu(x).split(sizes, -1)]
                return unit_heads(parts, unit) if unit else parts, None

            return activate, 0 if once else x.numel()
        before, cu_seqlens = self.past("conv"), self.cu_seqlens
        if once or x.shape[1] == 1 or linear.is_hooked(conv) or torch.compiler.is_compiling():
            return lambda x: conv.split(x, sizes, before, use_cache, cu_seqlens, context, unit), 0
        weight, bias = conv.weight, conv.bias
        options: dict[str, Any] = {
            "activation": conv.activation, "initial_state": before, "unit": unit
        }  # fmt: skip

        def convolve(x: Tensor) -> Parts:
            packed: Any = {"cu_seqlens": cu_seqlens, "context": context}
            return split_convolution(x, weight, bias, sizes, **packed, **options)

        return convolve, x.numel()
