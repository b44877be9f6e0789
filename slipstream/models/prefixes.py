"""States after prefixes of prompts, where prompts that begin alike start from."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear import prefix_states
from slipstream.models.cache import LayerState, StateCache
from slipstream.models.rollback import MLP_SHIFT
from slipstream.runtime.consistent import Prefixes, leaving


class PrefixCache:
    """Stores a model's states at regular distances in prompts, for prompts that begin the same way.

        cache = prefixes.prefill(input_ids)
        text = model.generate(input_ids, cache=cache)

    Args:
        model: a SlipstreamForCausalLM, whose weights stay as they are.
        every: tokens from one stored state to the next, a multiple of 64.
        max_bytes: of all stored states; the least recently used go first.
        key_dtype: as StateCache.

    Cost: one call of the model for what no stored state has, or one for each `every` tokens where a
    layer cannot leave states on its way (and with consistent=True); a copy of the states every so
    many tokens; a softmax layer's grows with the prefix.
    """

    def __init__(
        self,
        model: Any,
        every: int = 64,
        max_bytes: int = 1 << 30,
        key_dtype: torch.dtype | None = None,
    ) -> None:
        if every < 64 or every % 64:
            raise ValueError(f"every: want a multiple of 64, got {every}")
        self.model, self.every, self.max_bytes = model, every, max_bytes
        self.key_dtype = key_dtype
        self.caches: OrderedDict[tuple[int, ...], StateCache] = OrderedDict()
        self.reused = 0  # tokens that no prefill had to run again

    @torch.no_grad()
    def prefill(self, input_ids: Tensor) -> StateCache:
        """A cache of the prompt [1, T] except its last tokens, 1 to `every`, for generate to run.

        Raises:
            ValueError: more than one row, or none.
        """
        if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1:
            raise ValueError(f"input_ids: want shape (1, T), got {tuple(input_ids.shape)}")
        ids = tuple(input_ids[0].tolist())
        end = (len(ids) - 1) // self.every * self.every
        at = next((n for n in range(end, 0, -self.every) if ids[:n] in self.caches), 0)
        cache = StateCache(len(self.model.model.layers), None, self.key_dtype)
        if at:
            self.caches.move_to_end(ids[:at])
            cache = self.caches[ids[:at]].copy()
            self.reused += at
        ends = range(at + self.every, end + 1, self.every)
        at_once = self._leaves_states() and len(ends) > 1
        caches = (_by_one_call if at_once else _by_calls)(self, cache, input_ids, ends)
        for n, made in zip(ends, caches):
            self.caches[ids[:n]] = made
        self._forget()
        return cache

    def _leaves_states(self) -> bool:
        mixers = [block.mixer for block in self.model.model.layers]
        return not self.model.config.consistent and all(
            x.leaves_states and x.mode != "fused_recurrent" for x in mixers
        )

    def _forget(self) -> None:
        size = sum(cache.bytes() for cache in self.caches.values())
        while self.caches and size > self.max_bytes:
            size -= self.caches.popitem(last=False)[1].bytes()


def _by_calls(
    prefixes: PrefixCache, cache: StateCache, input_ids: Tensor, ends: range
) -> Iterator[StateCache]:
    """Copies of the cache, which moves on by a call for each."""
    for n in ends:
        part = input_ids[:, n - prefixes.every : n]
        prefixes.model.model(part, cache=cache, use_cache=True)
        yield cache.copy()


def _by_one_call(
    prefixes: PrefixCache, cache: StateCache, input_ids: Tensor, ends: range
) -> Iterator[StateCache]:
    """Computes the same by one call."""
    begin, end, every = ends[0] - prefixes.every, ends[-1], prefixes.every
    offsets = torch.tensor([0, end - begin], device=input_ids.device)
    rows = prefix_states.every(input_ids.new_empty(0), offsets, end - begin, every).rows
    found = Prefixes(every, len(ends), rows)
    with leaving(found):
        prefixes.model.model(input_ids[:, begin:end], cache=cache, use_cache=True)
    left = {name: iter(x) for name, x in found.tensors.items()}
    whole = [_states_of(layer, left) for layer in cache.layers]
    for i, n in enumerate(ends):
        made = StateCache(0, None, prefixes.key_dtype)
        made.layers = [
            _prefix(layer, n, {name: x[i : i + 1] for name, x in states.items()})
            for layer, states in zip(cache.layers, whole)
        ]
        yield made


def _states_of(layer: LayerState, left: dict[str, Iterator[Tensor]]) -> dict[str, Tensor]:
    """States [count, ...] from a layer's call, by the names of its state."""
    names = [x for x in layer.state or {} if x not in (*layer.token_states, "length")]
    return {x: next(left["shift" if x == MLP_SHIFT else x]) for x in names}


def _prefix(layer: LayerState, tokens: int, states: dict[str, Tensor]) -> LayerState:
    """One row's after its first n tokens: `states`, and the rest cut from the layer's."""
    own = layer.state or {}
    part = {name: x[:, :tokens] for name, x in own.items() if name in layer.token_states}
    if "length" in own:
        part["length"] = own["length"].new_full((1,), tokens)
    return layer.of(tokens, part | states)
