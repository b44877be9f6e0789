"""Decoding steps of models with consistent=True on CUDA, for graphs: on tensors of fixed addresses.

A step runs the layers for one token a row, [N, 1]. The recurrences alone see the block of 64 tokens
that it is in: their inputs of the block are kept (runtime/consistent.py). The places after that
token in the block hold zeros or tokens of older blocks, which change no bit of its result. Keys are
written behind those before it. Rows whose block is complete take over the states at its end.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.elementwise.place_tokens import place_tokens
from slipstream.layers.attention import InPlace
from slipstream.models.consistent import LayerStates, ModelStates, Row, State, normed
from slipstream.runtime import consistent


@dataclass
class OpenBlocks:
    """The block of each row that is not complete, and the states before it.

    Attributes:
        h: [N, 64, D], embeddings of each row's block; positions: [N, 64].
        counts: [N], the number of tokens in the block so far; seen: [N], of all tokens.
        lengths: of whole rows, known to the host.
        states: of each layer, after whole blocks; tensors with an entry for every token have room.
        inputs: of the operators that look at other tokens, for each row's block.
    """

    h: Tensor
    positions: Tensor
    counts: Tensor
    seen: Tensor
    lengths: list[int]
    states: list[State]
    token_states: list[tuple[str, ...]]
    inputs: consistent.BlockStep

    @staticmethod
    def of(model: Any, rows: list[Row], tokens: int) -> "OpenBlocks":
        """Blocks of these rows, with room for `tokens` more tokens in each."""
        N, like = len(rows), rows[0].h
        states = next((row.states for row in rows if row.states is not None), None)
        if states is None:
            states = _states_of_a_block(model, like)
        room = _room(max(row.length for row in rows), tokens)
        each = [block.mixer.token_states for block in model.layers]
        counts = rows[0].positions.new_zeros(N)
        made = OpenBlocks(
            like.new_zeros(N, consistent.BLOCK, like.shape[2]),
            rows[0].positions.new_zeros(N, consistent.BLOCK),
            counts,
            torch.zeros_like(counts),
            [],
            [
                {
                    name: x.new_zeros(N, room, *x.shape[2:])
                    if name in names
                    else x.new_zeros(N, *x.shape[1:])
                    for name, x in state.items()
                }
                for state, names in zip(states, each)
            ],
            each,
            consistent.BlockStep(counts, place_tokens),
        )
        made.load(model, rows)
        return made

    def takes(self, rows: list[Row]) -> bool:
        """Whether rows may be loaded into these tensors."""
        h = rows[0].h
        same = (self.h.shape[0], self.h.dtype, self.h.device) == (len(rows), h.dtype, h.device)
        return same and (torch.is_inference_mode_enabled() or not self.h.is_inference())

    def fits(self, length: int, tokens: int) -> bool:
        """Whether there is room for `tokens` more in rows of at most `length` tokens."""
        names = zip(self.states, self.token_states)
        rooms = [state[name].shape[1] for state, every in names for name in every]
        return all(room >= _room(length, tokens) for room in rooms)

    def load(self, model: Any, rows: list[Row]) -> None:
        """Takes over rows, a list of one sequence each, and runs their blocks once."""
        self.h.zero_()
        after = torch.arange(1, consistent.BLOCK + 1, device=self.h.device)
        self.lengths = [row.length for row in rows]
        counts = [row.h.shape[1] for row in rows]
        self.counts.copy_(torch.tensor(counts, device=self.counts.device))
        self.seen.copy_(torch.tensor(self.lengths, device=self.counts.device))
        for n, row in enumerate(rows):
            count = row.h.shape[1]
            self.h[n, :count] = row.h[0]
            last = row.positions[0, -1] if count else row.blocks * consistent.BLOCK - 1
            self.positions[n, :count] = row.positions[0]
            self.positions[n, count:] = last + after[: consistent.BLOCK - count]
            for i, own in enumerate(self.states):
                for name, x in own.items():
                    given = None if row.states is None else row.states[i][name]
                    if given is None:
                        x[n].zero_()
                    elif name in self.token_states[i]:
                        x[n, : given.shape[1]] = given[0]
                    else:
                        x[n] = given[0]
        with torch.no_grad(), self.inputs.running(fills=True):
            held = ModelStates([LayerStates(InPlace(x)) for x in self.states])
            model._run(normed(model, self.h), None, held, False, self.positions, None)

    def rows(self) -> list[Row]:
        """The rows with the tokens that were added since they were loaded, as copies."""
        found = []
        for n, length in enumerate(self.lengths):
            blocks, count = divmod(length, consistent.BLOCK)
            each = zip(self.states, self.token_states)
            states = tuple(_row_of(own, n, blocks * consistent.BLOCK, names) for own, names in each)
            h, positions = self.h[n : n + 1, :count], self.positions[n : n + 1, :count]
            found.append(Row(states if blocks else None, h.clone(), positions.clone(), blocks))
        return found

    def reorder(self, rows: Tensor) -> None:
        """Row n becomes what row rows[n] was, rows [N]."""
        if len(set(self.lengths)) > 1:
            self.lengths = [self.lengths[n] for n in rows.tolist()]
        own = (x for state in self.states for x in state.values())
        for x in (self.h, self.positions, self.counts, self.seen, *own):
            x.copy_(x[rows])
        self.inputs.reorder(rows)

    def closes(self) -> bool:
        """Whether the next token is the last of some row's block."""
        return any(n % consistent.BLOCK == consistent.BLOCK - 1 for n in self.lengths)

    def step(self, model: Any, input_ids: Tensor, positions: Tensor | None, closes: bool) -> Tensor:
        """Computes a token for each row: ids and positions [N, 1] -> hidden states [N, 1, D].

        closes: what it says before this step.
        """
        row = torch.arange(self.h.shape[0], device=self.h.device)
        at = row, self.counts
        x = model.embed_tokens(input_ids)
        self.h.index_put_(at, x[:, 0])
        if positions is not None:
            self.positions.index_put_(at, positions.expand(row.shape[0], 1)[:, 0])
        now = [
            InPlace({**own, "length": self.seen}) if "length" in own else InPlace(own)
            for own in self.states
        ]
        held = ModelStates([LayerStates(state) for state in now])
        with self.inputs.running():
            place = self.positions[at][:, None]
            y, _ = model._run(normed(model, x), None, held, False, place, None)
        self.counts.add_(1)
        self.seen.add_(1)
        if closes:
            self._close(held)
        return y

    def _close(self, held: ModelStates) -> None:
        whole = self.counts == consistent.BLOCK
        for own, names, layer in zip(self.states, self.token_states, held.layers):
            for name, x in own.items():
                if name not in names:  # those are there already
                    each = whole.view(-1, *[1] * (x.dim() - 1))
                    x.copy_(torch.where(each, (layer.after or {})[name], x))
        self.positions.add_(consistent.BLOCK * whole[:, None])
        self.counts.mul_(~whole)


def _room(length: int, tokens: int) -> int:
    """Entries of a tensor with one for each token: whole blocks, as a step writes a whole one."""
    return ((length + tokens) // consistent.BLOCK + 1) * consistent.BLOCK


def _row_of(state: State, n: int, end: int, token_states: tuple[str, ...]) -> State:
    return {
        name: (x[n : n + 1, :end] if name in token_states else x[n : n + 1]).clone()
        for name, x in state.items()
    }


def _states_of_a_block(model: Any, like: Tensor) -> tuple[State, ...]:
    """The states after any 64 tokens."""
    h = like.new_zeros(1, consistent.BLOCK, like.shape[2])
    held = ModelStates([LayerStates() for _ in model.layers])
    positions = torch.arange(consistent.BLOCK, device=like.device)[None]
    model._run(normed(model, h), None, held, False, positions, None)
    return tuple(layer.after or {} for layer in held.layers)
