"""What the layers keep between calls, as transformers' generate expects a cache to look."""

from dataclasses import fields
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

# What outputs of models call it: past_key_values before transformers 5.24.
CACHE = next(
    x.name for x in fields(CausalLMOutputWithPast) if x.name in ("cache", "past_key_values")
)


class LayerState(CacheLayerMixin):
    """One layer's state: tensors [N, ...], a row for each sequence, whatever the layer keeps.

    A recurrent layer's state has a fixed size; softmax attention's grows. Neither can be
    reindexed by token, so there is no `update`: the layer returns its next state as a whole.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Tensor] | None = None
        self.seen = 0  # columns of the batch so far, padding included

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("LayerState: layers return their state, they do not update it")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("LayerState: layers return their state, they do not update it")

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotImplementedError(
                "LayerState: a recurrent state cannot forget its last tokens; assisted decoding "
                "needs a model of attention layers from elsewhere"
            )

    def reset(self) -> None:
        self.state, self.seen = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def _map(self, move: Any) -> None:
        if self.state is not None:
            self.state = {name: move(x) for name, x in self.state.items()}


class StateCache(Cache):
    """The states of all layers; `cache` of the model, made by its first call."""

    layers: list[LayerState]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[LayerState() for _ in range(num_layers)])

    def bytes(self) -> int:
        """Memory of all states; of a model without softmax attention, the same at any length."""
        states = [layer.state or {} for layer in self.layers]
        return sum(x.numel() * x.element_size() for state in states for x in state.values())


def the_cache(cache: StateCache | None, past_key_values: StateCache | None) -> StateCache | None:
    """Of an argument with two names."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache: want it or past_key_values, its older name, got both")
    return past_key_values if cache is None else cache


def named(cache: StateCache | None) -> dict[str, Any]:
    """It as an argument of outputs."""
    return {CACHE: cache}


def expect_cache(cache: object, num_layers: int) -> None:
    if not isinstance(cache, StateCache):
        raise TypeError(
            "cache (past_key_values): want a slipstream.models.StateCache, got "
            f"{type(cache).__name__}; pass None and the model makes its own"
        )
    if len(cache.layers) != num_layers:
        raise ValueError(
            f"cache (past_key_values): want a cache of {num_layers} layers, got {len(cache.layers)}"
        )
