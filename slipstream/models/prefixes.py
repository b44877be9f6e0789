"""States after prefixes of prompts, where prompts that begin alike start from."""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from slipstream.models.cache import StateCache


class PrefixCache:
    """Stores a model's states at regular distances in prompts, for prompts that begin the same way.

        cache = prefixes.prefill(input_ids)
        text = model.generate(input_ids, cache=cache)  # past_key_values= before transformers 5.24

    Args:
        model: a SlipstreamForCausalLM, whose weights stay as they are.
        every: tokens from one stored state to the next, a multiple of 64.
        max_bytes: of all stored states; the least recently used go first.
        state_dtype, key_dtype: as StateCache.

    Cost: a copy of the states every so many tokens; a softmax layer's grows with the prefix.
    """

    def __init__(
        self,
        model: Any,
        every: int = 64,
        max_bytes: int = 1 << 30,
        state_dtype: torch.dtype | None = None,
        key_dtype: torch.dtype | None = None,
    ) -> None:
        if every < 1 or every % 64:
            raise ValueError(f"every: want a multiple of 64, got {every}")
        self.model, self.every, self.max_bytes = model, every, max_bytes
        self.rounding = state_dtype, key_dtype
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
        cache = StateCache(len(self.model.model.layers), None, *self.rounding)
        if at:
            self.caches.move_to_end(ids[:at])
            cache = self.caches[ids[:at]].copy()
            self.reused += at
        for n in range(at, end, self.every):
            self.model.model(input_ids[:, n : n + self.every], cache=cache, use_cache=True)
            self.caches[ids[: n + self.every]] = cache.copy()
        self._forget()
        return cache

    def _forget(self) -> None:
        size = sum(cache.bytes() for cache in self.caches.values())
        while self.caches and size > self.max_bytes:
            size -= self.caches.popitem(last=False)[1].bytes()
