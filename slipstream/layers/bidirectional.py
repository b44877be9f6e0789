"""A layer in both directions of time, of whole sequences or within blocks."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from slipstream.layers.base import Mixer, expect_first_value
from slipstream.layers.call import MixerCall, State
from slipstream.runtime.context_parallel import ContextParallel

COMBINE = ("mean", "sum")


class Bidirectional(Mixer):
    """The mean of a layer's output for sequences and for the same sequences read backwards.

        y = (layer(x) + turned(layer(turned(x)))) / 2

    Both directions are one call of the layer, on packed sequences, and share its weights; with a
    context two, of which the second has the ranks in reverse order, or blocks of one rank. With
    block_size the second direction is of blocks, each on its own, so that a token sees its block
    whole and all blocks before: the block-causal mask of diffusion language models.

    Args:
        layer: any of slipstream.layers.
        block_size: tokens of a block, counted from the beginning of each call's sequences; None
            turns whole sequences.
        combine: "mean" or "sum" of the two.

    Raises:
        ValueError: a state or use_cache without block_size: the second direction begins at the
            end; with a context and block_size, a rank that begins within a block.
        NotImplementedError: attention of whole sequences with a context.

    State: that of the layer, after whole blocks; only with block_size.
    Cost: that of the layer for twice as many tokens. With cu_seqlens and block_size the host waits
    for the offsets.
    """

    def __init__(
        self, layer: Mixer, *, block_size: int | None = None, combine: str = "mean"
    ) -> None:
        super().__init__(layer.mode, layer.layer_idx)
        if block_size is not None and block_size < 1:
            raise ValueError(f"block_size: want at least 1 token or None, got {block_size}")
        if combine not in COMBINE:
            raise ValueError(f"combine: want one of {COMBINE}, got {combine!r}")
        self.layer, self.block_size, self.combine = layer, block_size, combine
        # classes say it, but here each layer does
        self.token_states = layer.token_states  # pyright: ignore[reportAttributeAccessIssue]
        self.takes_first_value = layer.takes_first_value

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        context: ContextParallel | None = None,
        positions: Tensor | None = None,
        state: State | None = None,
        use_cache: bool = False,
        first_value: Tensor | None = None,
        output_value: bool = False,
    ) -> Any:
        """Computes as Mixer does. The last two are RWKV7.forward's, of layers that take them: both
        directions read first_value, and the value returned is the mean of theirs."""
        call = MixerCall(cu_seqlens, context, positions, state, use_cache)
        return self._mixed(x, call, first_value=first_value, output_value=output_value)

    def _mix_tokens(
        self,
        x: Tensor,
        call: MixerCall,
        first_value: Tensor | None = None,
        output_value: bool = False,
    ) -> Any:
        cu_seqlens, context, positions, state, use_cache = call
        if self.takes_first_value:
            layer: Any = self.layer
            expect_first_value(x, first_value, layer.num_heads * layer.head_dim)
        if self.block_size is None and (state is not None or use_cache):
            name = "use_cache" if state is None else "state"
            raise ValueError(f"{name}: want a layer with block_size; both directions have no state")
        if context is not None:
            context.expect_no_offsets(cu_seqlens, None)
            options = {"positions": positions, "state": state, "use_cache": use_cache}
            return self._across_ranks(x, context, first_value, output_value, options)
        B, T, _ = x.shape
        offsets, parts = self._parts(B, T, cu_seqlens, x.device)
        turned = _turned(parts, B * T)
        ends = torch.cat([offsets, B * T + parts[1:]]).int()
        places = _places(positions, parts, B)
        N, more = offsets.shape[0] - 1, parts.shape[0] - 1
        first = None if first_value is None else _both(first_value, turned)
        y, after, *value = self.layer(
            _both(x, turned), cu_seqlens=ends, positions=places, state=_widened(state, more),
            use_cache=use_cache, **_values(first, output_value),
        )  # fmt: skip
        if after is not None:
            after = {name: s[:N] for name, s in after.items()}
        forth = [z[:, : B * T].reshape(x.shape) for z in (y, *value)]
        back = [z[:, B * T :][:, turned].reshape(x.shape) for z in (y, *value)]
        return self._results(forth, back, after)

    def _across_ranks(
        self,
        x: Tensor,
        context: ContextParallel,
        first_value: Tensor | None,
        output_value: bool,
        options: dict[str, Any],
    ) -> Any:
        """Two calls: sequences go on at other ranks forth, and back too unless they are blocks."""
        y, after, *value = self.layer(
            x, context=context, **options, **_values(first_value, output_value)
        )
        B, T, _ = x.shape
        if self.block_size is None:
            rows, turned = B, torch.arange(T - 1, -1, -1, device=x.device)
            others: dict[str, Any] = {"context": context.reversed()}
        else:
            context.share(T).expect_begins("block_size", self.block_size)
            _, parts = self._parts(B, T, context.offsets_on(x.device), x.device)
            rows, turned = 1, _turned(parts, B * T)
            others = {"cu_seqlens": parts.int()}

        def turn(y: Tensor) -> Tensor:
            return y.reshape(rows, turned.shape[0], y.shape[-1])[:, turned]

        first = None if first_value is None else turn(first_value)
        back, _, *more = self.layer(turn(x), **others, **_values(first, output_value))
        back = [turn(z).reshape(x.shape) for z in (back, *more)]
        return self._results([y, *value], back, after)

    def _results(self, forth: list[Tensor], back: list[Tensor], after: State | None) -> Any:
        """y, and the value for later layers if there is one, in both directions."""
        (y, *value), (other, *more) = forth, back
        return (self._combined(y, other), after, *((a + b) / 2 for a, b in zip(value, more)))

    def _combined(self, forth: Tensor, back: Tensor) -> Tensor:
        y = forth + back
        return y / 2 if self.combine == "mean" else y

    def step(
        self, x: Tensor, state: State, *, positions: Tensor | None = None, **options: Any
    ) -> Any:
        return self._call_in_place(x, state, positions, **options)

    def _parts(
        self, B: int, T: int, cu_seqlens: Tensor | None, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Offsets of the sequences, and of what is turned, int64."""
        if cu_seqlens is None:
            offsets = torch.arange(B + 1, device=device) * T
            if self.block_size is None or T == 0:
                return offsets, offsets
            starts = torch.arange(0, T, self.block_size, device=device)
            blocks = (offsets[:-1, None] + starts).flatten()
            return offsets, torch.cat([blocks, offsets[-1:]])
        offsets = cu_seqlens.long()
        if self.block_size is None:
            return offsets, offsets
        bounds = offsets.tolist()
        found = [i for a, b in pairwise(bounds) for i in range(a, b, self.block_size)]
        return offsets, torch.tensor([*found, bounds[-1]], device=device)


def _values(first_value: Tensor | None, output_value: bool) -> dict[str, Any]:
    """Options that only some layers take."""
    given: dict[str, Any] = {} if first_value is None else {"first_value": first_value}
    return given | ({"output_value": True} if output_value else {})


def _both(x: Tensor, turned: Tensor) -> Tensor:
    """[1, 2 B T, D]: all tokens, and the same turned."""
    rows = x.flatten(0, 1)
    return torch.cat([rows, rows[turned]])[None]


def _turned(parts: Tensor, tokens: int) -> Tensor:
    """The place of each token if every part is turned; this order is its own inverse."""
    at = torch.arange(tokens, device=parts.device)
    part = torch.searchsorted(parts[1:].contiguous(), at, right=True)
    part = part.clamp(max=max(parts.shape[0] - 2, 0))
    # bounded: on a GPU wrong offsets are known only later
    return (parts[part] + parts[part + 1] - 1 - at).clamp(0, tokens - 1) if tokens else at


def _places(positions: Tensor | None, parts: Tensor, B: int) -> Tensor | None:
    """Positions of both directions: those given, and as they count on through each turned part."""
    if positions is None:
        return None
    forth = positions.expand(B, -1).reshape(1, -1)
    at = torch.arange(forth.shape[1], device=forth.device)
    part = torch.searchsorted(parts[1:].contiguous(), at, right=True)
    first = parts[part.clamp(max=max(parts.shape[0] - 2, 0))].clamp(0, max(len(at) - 1, 0))
    return torch.cat([forth, forth[:, first] + at - first], dim=1)


def _widened(state: State | None, more: int) -> State | None:
    """The state with that many more sequences, which begin at zero."""
    if state is None:
        return None
    return {name: torch.cat([s, s.new_zeros(more, *s.shape[1:])]) for name, s in state.items()}
