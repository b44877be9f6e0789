"""The layers' cache between calls: a pool of states, with the interface of transformers' caches.

Every tensor is made once and updated in place from then on, so that a CUDA graph of a decoding step
stays right. Only what changes the number of rows (batch_select_indices, batch_repeat_interleave) or
outgrows max_length makes new ones, and drops the graphs.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from slipstream.layers import Mixer
from slipstream.models import open_rows, rollback
from slipstream.nn import rounded

# What outputs of models call it: past_key_values before transformers 5.24.
CACHE = next(
    x.name for x in fields(CausalLMOutputWithPast) if x.name in ("cache", "past_key_values")
)
# Room for tokens is made in multiples of this where max_length is not given.
ROOM = 64


class LayerState(CacheLayerMixin):
    """One layer's state: tensors [N, ...], a row for each sequence, whatever the layer keeps.

    A recurrent layer's tensors have a fixed size. Those of a softmax layer that hold a number for
    every token are [N, S, ...] with room for S tokens, of which the first length[n] are used.

    Args:
        max_length: S; None begins with what the first call needs and grows.
        key_dtype: torch.int8 or torch.float8_e4m3fn keeps keys and values of `attention` so, each
            with a scale of its token and head, `k_scale`: half of bfloat16's bytes. None is the
            dtype that the layer returns.
    """

    is_sliding = False
    is_compileable = True

    def __init__(self, max_length: int | None = None, key_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length: want 1 or more, or None, got {max_length}")
        rounded.expect_key_dtype(key_dtype)
        self.max_length, self.key_dtype = max_length, key_dtype
        self.seen = 0  # columns of the batch so far, padding included
        self.token_states: tuple[str, ...] = ()
        self.rounded_keys: tuple[str, ...] = ()  # of the mixer
        self.rollback: rollback.Rollback | None = None
        self._tensors: dict[str, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The contents of a copy or a file: without autograd's graph."""
        tensors = tree_map_only(Tensor, Tensor.detach, self._tensors)
        return vars(self) | {"_tensors": rounded.as_bytes(tensors)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"_tensors": rounded.of_bytes(state["_tensors"])})

    @property
    def state(self) -> dict[str, Tensor] | None:
        """The tensors themselves, changed by the next call; None before the first tokens."""
        return self._tensors if self.is_initialized else None

    @property
    def room(self) -> int | None:
        """The number of places S; None without tensors that grow."""
        if self._tensors is None or not self.token_states:
            return None
        return self._tensors[self.token_states[0]].shape[1]

    def view(self, tokens: int | None) -> dict[str, Tensor]:
        """The state for a call with T more tokens, with the places used then of tensors that have
        one for each token; None is with all places."""
        assert self._tensors is not None
        if not self.token_states or tokens is None:
            return self._tensors
        end = self.seen + tokens
        return {n: x[:, :end] if n in self.token_states else x for n, x in self._tensors.items()}

    def wide(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns `view` of no more tokens for a layer's forward, with nothing in 8 bits."""
        return rounded.wide(self.view(0), dtype)

    def write(self, state: dict[str, Tensor], mixer: Mixer) -> bool:
        """Takes over what a layer returned: into the tensors there are, if it fits into them.

        Returns whether there are others now. With gradients wanted the returned tensors become the
        state, for the graph of autograd.
        """
        old = self._tensors
        moved = True
        with_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in state.values())
        self.token_states, self.rounded_keys = mixer.token_states, mixer.rounded_keys
        if self.rollback is not None and not self.is_initialized:
            self.rollback.first = self.seen
        if not with_gradients:
            state = self._rounded(state)
        if with_gradients:
            self._tensors = dict(state)
        elif (
            old is None
            or old.keys() != state.keys()
            or not all(self._fits(name, x) for name, x in state.items())
        ):
            self._tensors = {name: self._with_room(name, x) for name, x in state.items()}
        else:
            moved = False
            for name, x in state.items():
                target = old[name][:, : x.shape[1]] if name in self.token_states else old[name]
                if target.data_ptr() != x.data_ptr():
                    target.copy_(x)
        self.is_initialized = True
        return moved

    def _rounded(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rounds a state as this keeps it; token_states get the scales."""
        if not rounded.has_rounded(state):
            state = rounded.rounded(state, self.key_dtype, self.rounded_keys)
        scales = (name + rounded.SCALE for name in self.rounded_keys)
        more = (name for name in scales if name in state and name not in self.token_states)
        self.token_states = (*self.token_states, *more)
        return state

    def _fits(self, name: str, x: Tensor) -> bool:
        assert self._tensors is not None
        old = self._tensors[name]
        if old.requires_grad or old.is_inference() != x.is_inference():
            return False
        same = (old.dtype, old.device, old.dim()) == (x.dtype, x.device, x.dim())
        if name not in self.token_states:
            return same and old.shape == x.shape
        fits = old.shape[:1] + old.shape[2:] == x.shape[:1] + x.shape[2:]
        return same and fits and x.shape[1] <= old.shape[1]

    def _with_room(self, name: str, x: Tensor) -> Tensor:
        if name not in self.token_states:
            # a copy, for it may be a view of a whole prompt
            return x.clone(memory_format=torch.contiguous_format)
        if self.max_length is not None and x.shape[1] <= self.max_length:
            room = self.max_length
        else:
            room = (x.shape[1] + ROOM) // ROOM * ROOM
        tensor = x.new_zeros(x.shape[0], room, *x.shape[2:])
        tensor[:, : x.shape[1]].copy_(x)
        return tensor

    def _own(self, detach: bool = True) -> bool:
        """Copies tensors that may not be written: that autograd has saved (without `detach` these
        stay), or inference mode has made, outside of it. Whether it did."""
        tensors, inference = self._tensors or {}, torch.is_inference_mode_enabled()
        odd = {n for n, x in tensors.items() if x.is_inference() and not inference}
        if detach and (odd or any(x.requires_grad for x in tensors.values())):
            odd = {*tensors}
        if odd:
            copies = {n: x.detach().clone() if n in odd else x for n, x in tensors.items()}
            self._tensors = self._rounded(copies) if detach else copies
        return bool(odd)

    def reserve(self, tokens: int) -> bool:
        """Makes tensors that T more tokens can be written into; whether that moved them."""
        if self.state is None:
            return False
        moved = self._own()
        room = self.room
        if room is None or self.seen + tokens <= room:
            return moved
        assert self._tensors is not None
        # twice as much each time: a copy of all now and then, not at every token
        more = max(room, (self.seen + tokens - room + ROOM) // ROOM * ROOM)
        for name in self.token_states:
            old = self._tensors[name]
            self._tensors[name] = old.new_zeros(old.shape[0], room + more, *old.shape[2:])
            self._tensors[name][:, :room].copy_(old)
        return True

    def copied(self, row: int) -> "LayerState":
        """Copies one row, with no more room than it uses."""
        part = None
        if self.state is not None:
            part = {n: x[row : row + 1] for n, x in self.view(0).items()}
        made = self.of(self.seen, part)
        made.rollback = None if self.rollback is None else self.rollback.of_row(row)
        return made

    def of(self, seen: int, tensors: dict[str, Tensor] | None) -> "LayerState":
        """A state of the same kind, holding copies of tensors after `seen` tokens."""
        made = LayerState(None, self.key_dtype)
        made.seen, made.token_states = seen, self.token_states
        made.rounded_keys = self.rounded_keys
        if tensors is not None:
            dense = torch.contiguous_format
            copies = {n: x.detach().clone(memory_format=dense) for n, x in tensors.items()}
            made._tensors = made._rounded(copies)
            made.is_initialized = True
        return made

    def empty_rows(self, rows: int, max_length: int | None) -> "LayerState":
        """A state with the given number of rows: tensors like these, all zero."""
        assert self._tensors is not None
        made = LayerState(max_length, self.key_dtype)
        made.token_states, made.rounded_keys = self.token_states, self.rounded_keys
        like = made._rounded({name: x.detach()[:1] for name, x in self._tensors.items()})
        made.is_initialized, made._tensors = True, {}
        for name, x in like.items():
            sizes = list(x.shape[1:])
            if name in made.token_states:
                sizes[0] = max_length or ROOM
            made._tensors[name] = x.new_zeros(rows, *sizes)
        return made

    def put(self, row: int, other: "LayerState | None") -> None:
        """Sets one row to that of a state of one row, or to an empty one."""
        assert self._tensors is not None
        source = None if other is None or other.state is None else other.view(0)
        for name, x in self._tensors.items():
            if source is None:
                if name not in self.token_states:
                    x[row].zero_()
            elif name in self.token_states:
                x[row, : source[name].shape[1]].copy_(source[name][0])
            else:
                x[row].copy_(source[name][0])

    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.state or {}).values())

    # as transformers calls them

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1 if self.max_length is None else self.max_length

    get_max_cache_shape = get_max_length  # before transformers 5.24

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("LayerState: layers return their state, they do not update it")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("LayerState: layers return their state, they do not update it")

    @property
    def is_croppable(self) -> bool:
        if self.token_states:
            # what came before the last tokens is in the keys, but not for an MLP that shifts
            return rollback.MLP_SHIFT not in (self.state or {})
        return self.rollback is not None

    def activate_past_recording(self) -> None:
        """Keeps what `crop` needs, from the next tokens on; of a softmax layer nothing more."""
        if self.rollback is None:
            self.rollback = rollback.Rollback()

    def record(self, record: rollback.Record) -> None:
        """Records the arguments of a layer's call, before the call."""
        if self.rollback is not None and not self.token_states:
            self.rollback.add(record, self.seen, self.state)

    def record_mlp(self, x: Tensor) -> None:
        """Records the same call's arguments of an MLP with a state."""
        if self.rollback is not None and not self.token_states:
            self.rollback.add_mlp(x)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -n tokens of every row; a positive n is how many to keep."""
        count = rollback.forgotten_tokens(self, tokens_to_remove)
        if self._tensors is not None and count and self.token_states:
            self._tensors["length"].sub_(count)
        elif self._tensors is not None and count and self.rollback is not None:
            self._replay(*self.rollback.back_to(self.seen - count))
        self.seen -= count
        self.is_initialized = self.is_initialized and self.seen > 0

    @torch.no_grad()
    def _replay(self, start: dict[str, Tensor] | None, records: list[rollback.Record]) -> None:
        self._own()
        assert self._tensors is not None
        for name, x in self._tensors.items():
            x.copy_(torch.zeros_like(x) if start is None else start[name])
        for record in records:
            record.run(self._tensors)

    def reset(self) -> None:
        """Removes all tokens; the tensors stay where they are."""
        self.is_initialized, self.seen = False, 0
        if self.rollback is not None:
            self.rollback = rollback.Rollback()
        for name, x in (self._tensors or {}).items():
            if name not in self.token_states:
                x.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        def move(x: Tensor) -> Tensor:
            return x.index_select(0, beam_idx.to(x.device))

        for name, x in (self.state or {}).items():
            used = x[:, : self.seen] if name in self.token_states else x
            used.copy_(move(used))
        if self.rollback is not None:
            self.rollback.map(move)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._replace(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._replace(lambda x: x.repeat_interleave(repeats, dim=0))

    def _replace(self, move: Callable[[Tensor], Tensor]) -> None:
        if self._tensors is not None:
            self._tensors = {name: move(x) for name, x in self._tensors.items()}
        if self.rollback is not None:
            self.rollback.map(move)


class StateCache(open_rows.OpenRows):
    """The states of all layers; `cache` of the model, made by its first call.

    A pool: its tensors keep their addresses, and every call of the model without gradients updates
    them in place. Rows are sequences, all of the same number of columns, padding included.

    Args:
        num_layers: of the model.
        max_length: tokens that softmax layers get room for at once; None lets them grow. Recurrent
            layers need none.
        key_dtype: torch.int8 or torch.float8_e4m3fn keeps keys and values of softmax attention in 8
            bits (LayerState); None as layers return them.
    """

    layers: list[LayerState]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self, num_layers: int, max_length: int | None = None, key_dtype: torch.dtype | None = None
    ) -> None:
        open_rows.expect_count("num_layers", num_layers)
        self.max_length, self.key_dtype = max_length, key_dtype
        super().__init__(layers=[LayerState(max_length, key_dtype) for _ in range(num_layers)])
        # of decoding steps, by what they were captured for: models/graphs.py
        self.graphs: dict[Any, Any] = {}
        self.made_for: Any = None
        # what greedy steps read and write: models/greedy.py
        self.greedy: Any = None
        self.drafts: Any = None  # of steps that verify drafts: models/greedy.py
        self.lengths = None

    def __getstate__(self) -> dict[str, Any]:
        """The contents of a copy or a file: without graphs and their tensors, which have none."""
        rows = tree_map_only(Tensor, Tensor.detach, self.open_rows)  # blocks may know more
        own = {"graphs": {}, "made_for": None, "greedy": None, "drafts": None, "_blocks": None}
        return vars(self) | own | {"_rows": rows, "_stepped": False}

    @property
    def records(self) -> bool:
        """Whether activate_past_recording() was called."""
        return any(layer.rollback is not None for layer in self.layers)

    def bytes(self) -> int:
        """Memory of all states; of a model without softmax attention, the same at any length."""
        return self.bytes_of_rows() + sum(layer.bytes() for layer in self.layers)

    def reserve(self, tokens: int) -> None:
        """Room for T more tokens in the softmax layers; graphs go if that moved tensors."""
        tokens = open_rows.expect_count("tokens", tokens)
        moved = [layer.reserve(tokens) for layer in self.layers]
        if any(moved):
            self.graphs.clear()

    def next_positions(self) -> Tensor | None:
        """[N, 1], where layers that count their tokens put the next; None if there are none."""
        for layer in self.layers:
            if "length" in (layer.state or {}):
                return (layer.state or {})["length"][:, None].clone()
        return None

    def step_on(self, tokens: int, absent: Tensor | None = None) -> None:
        """Counts T columns more, in every row; absent: of packing.Sequences."""
        self.absent.add(self.get_seq_length(), tokens, absent)
        self.step_blocks_on(tokens)
        if self.lengths is not None:
            self._set_lengths([n + tokens for n in self.lengths])
        else:
            for layer in self.layers:
                layer.seen += tokens

    def copy(self, row: int = 0) -> "StateCache":
        """Copies one row: to be kept as the state after a prefix, or to go on with."""
        if self.rows:
            row = open_rows.expect_row(row, self.rows)
        made = StateCache(0, None, self.key_dtype)
        made.layers = [layer.copied(row) for layer in self.layers]
        if self.open_rows is not None:  # whose tensors no call changes
            made.open_rows = [self.open_rows[row]]
        made._absent = self.absent.map(lambda x: x[row : row + 1])
        if self.lengths is not None:
            for layer in made.layers:
                layer.seen = self.lengths[row]
                for name in layer.token_states:
                    assert layer._tensors is not None
                    layer._tensors[name] = layer._tensors[name][:, : layer.seen].clone()
        return made

    def pool(self, rows: int, max_length: int | None = None) -> "StateCache":
        """An empty cache of so many rows, for the model that this one is of and has been used by.

        Its rows are sequences of different lengths: `put` fills one, a call of the model with a
        token for every row steps all, and `copy` takes one out. What a row holds that nobody needs
        does not matter, but it counts: `put(row, None)` empties it.
        """
        self._expect_tensors("pool")
        rows = open_rows.expect_count("rows", rows)
        made = StateCache(0, max_length, self.key_dtype)
        made.layers = [layer.empty_rows(rows, max_length) for layer in self.layers]
        made.lengths = [0] * rows
        return made

    def put(self, row: int, cache: "StateCache | None") -> None:
        """Makes a row of a pool what a cache of one row is, or empty. No tensor moves, unless the
        cache is longer than the pool has room for."""
        if self.lengths is None:
            raise ValueError("put: want a cache that StateCache.pool() made")
        row = open_rows.expect_row(row, len(self.lengths))
        if cache is not None:
            self._expect_fits(cache)
            if cache.key_dtype != self.key_dtype:
                raise ValueError(f"put: want key_dtype {self.key_dtype}, got {cache.key_dtype}")
        self.lengths[row] = 0 if cache is None else cache.get_seq_length()
        self._set_lengths(self.lengths)
        self.reserve(0)
        others = [None] * len(self.layers) if cache is None else cache.layers
        for layer, other in zip(self.layers, others):
            layer.put(row, other)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.graphs.clear()
        super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        repeats = open_rows.expect_count("repeats", repeats)
        self.graphs.clear()
        super().batch_repeat_interleave(repeats)

    def activate_past_recording(self) -> None:
        """Lets `crop` work from now on: for the last 64 tokens at least, and all of the last call.

        Softmax layers need nothing for it. A recurrent layer keeps copies of its state, up to three
        with 64 tokens or more between them, and the inputs of its mixer [N, D] of up to 128 tokens
        and of the last call; `crop` goes back to a copy and runs the mixer over what is kept. Of a
        consistent model it keeps the last call that completed a block, with the states before it.
        """
        for layer in self.layers:
            layer.activate_past_recording()

    @property
    def is_croppable(self) -> bool:
        return all(layer.is_croppable for layer in self.layers)


def named(cache: StateCache | None) -> dict[str, Any]:
    """The cache as a keyword of the model's outputs."""
    return {CACHE: cache}
