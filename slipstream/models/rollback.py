"""Makes a recurrent layer forget tokens: it runs again from a copy of an earlier state.

    segments    each a copy of the state at some token, and what the mixer was called with since

The last segment takes up to WINDOW tokens before the next begins. The oldest go as long as WINDOW
tokens remain, so there are at most three.
"""

import itertools
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.layers import Mixer

State = dict[str, Tensor]
# tokens that can be taken back at any time
WINDOW = 64
MLP_SHIFT = "mlp_shift"
"""Name of what RWKV7ChannelMix keeps, beside the tensors of the mixer: its last input."""


@dataclass
class Record:
    """One call of a mixer: x [N, T, D], positions [1 or N, T] or None, and RWKV7's options.

    mlp_x: what an MLP with a state was then called with, [N, T, D].
    """

    mixer: Mixer
    x: Tensor
    positions: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    mlp_x: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Record":
        memo[id(self.mixer)] = self.mixer  # the model's own, whose weights a copy shares
        return replace(
            self, **{f.name: deepcopy(getattr(self, f.name), memo) for f in fields(self)}
        )

    @property
    def tokens(self) -> int:
        return self.x.shape[1]

    def run(self, state: State) -> None:
        self.mixer.step(self.x, state, positions=self.positions, **self.options)
        if self.mlp_x is not None:
            state[MLP_SHIFT].copy_(self.mlp_x[:, -1])

    @staticmethod
    def joined(records: list["Record"]) -> list["Record"]:
        """Consecutive calls in as few: with positions of the caller's, and without."""
        groups = itertools.groupby(records, lambda record: record.positions is not None)
        return [Record._as_one(list(group)) for _, group in groups]

    @staticmethod
    def _as_one(records: list["Record"]) -> "Record":
        first, rows = records[0], records[0].x.shape[0]

        def join(parts: list[Any]) -> Any:
            is_tokens = isinstance(parts[0], Tensor) and parts[0].dim() > 1
            return torch.cat(parts, 1) if is_tokens else parts[0]

        options = {name: join([r.options[name] for r in records]) for name in first.options}
        positions = first.positions
        if len(records) > 1:  # of one row for all, or of each
            parts = [r.positions.expand(rows, -1) for r in records if r.positions is not None]
            positions = torch.cat(parts, 1) if parts else None
        x, mlp_x = join([r.x for r in records]), join([r.mlp_x for r in records])
        return replace(first, x=x, positions=positions, options=options, mlp_x=mlp_x)

    def part(self, begin: int, end: int) -> "Record":
        """A record of these tokens alone, copied: a view of a few would keep a whole prompt's."""

        def cut(x: Any) -> Any:
            is_tokens = isinstance(x, Tensor) and x.dim() > 1
            return x[:, begin:end].clone() if is_tokens else x

        options = {name: cut(x) for name, x in self.options.items()}
        x, mlp_x, positions = cut(self.x), cut(self.mlp_x), cut(self.positions)
        return replace(self, x=x, positions=positions, options=options, mlp_x=mlp_x)

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        rows = self.x.shape[0]
        self.x = move(self.x)
        if self.mlp_x is not None:
            self.mlp_x = move(self.mlp_x)
        if self.positions is not None and self.positions.shape[0] == rows:
            self.positions = move(self.positions)
        for name, x in self.options.items():
            if isinstance(x, Tensor):
                self.options[name] = move(x)


@dataclass
class Segment:
    begin: int  # tokens before it
    state: State | None  # after them; None is the start of a sequence
    records: list[Record]

    @property
    def tokens(self) -> int:
        return sum(record.tokens for record in self.records)

    @property
    def end(self) -> int:
        return self.begin + self.tokens


class Rollback:
    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.first = 0  # columns before the first token: padding

    def add(self, record: Record, seen: int, state: State | None) -> None:
        """Called before the call that `record` describes; `state` is that after `seen` tokens."""
        last = self.segments[-1] if self.segments else None
        # calls with padding or gradients have no records: they lie between segments
        if last is None or last.tokens >= WINDOW or last.end != seen:
            copies = None if state is None else {name: x.clone() for name, x in state.items()}
            self.segments.append(Segment(seen, copies, []))
        self.segments[-1].records.append(record.part(0, record.tokens))
        end = seen + record.tokens
        while len(self.segments) > 1 and end - self.segments[1].begin >= WINDOW:
            del self.segments[0]

    def add_mlp(self, x: Tensor) -> None:
        """Keeps the MLP's input for the call that was added last."""
        self.segments[-1].records[-1].mlp_x = x.clone()

    def segments_to(self, token: int) -> list[Segment]:
        """Returns those up to the one that `token` tokens end in; none where no token is left.

        Raises:
            ValueError: there is no state as old as that, or a call with padding or gradients
                lies there.
        """
        if token <= self.first:
            return []
        usable = [segment for segment in self.segments if segment.begin <= token]
        if not usable:
            oldest = "no call without padding and gradients was recorded"
            if self.segments:
                oldest = f"the oldest kept is after {self.segments[0].begin}"
            raise ValueError(f"crop: the state after {token} tokens is gone, {oldest}")
        if token > usable[-1].end:
            raise ValueError(
                f"crop: a call with padding or gradients, which begins after {usable[-1].end} "
                f"columns, goes as a whole, got {token} columns to keep"
            )
        return usable

    def back_to(self, token: int) -> tuple[State | None, list[Record]]:
        """The state to begin with and the calls from there to `token`; what is later is dropped."""
        self.segments = usable = self.segments_to(token)
        if not usable:
            return None, []
        last, records, at = usable[-1], [], usable[-1].begin
        for record in last.records:
            if at < token:
                count = min(record.tokens, token - at)
                records.append(record if count == record.tokens else record.part(0, count))
            at += record.tokens
        last.records = Record.joined(records)
        return last.state, last.records

    def of_row(self, row: int) -> "Rollback":
        """Copies what crop needs of one row."""
        made = Rollback()
        made.first = self.first
        made.segments = [
            replace(s, records=[replace(r, options=dict(r.options)) for r in s.records])
            for s in self.segments
        ]
        made.map(lambda x: x[row : row + 1].clone())
        return made

    def map(self, move: Callable[[Tensor], Tensor]) -> None:
        for segment in self.segments:
            if segment.state is not None:
                segment.state = {name: move(x) for name, x in segment.state.items()}
            for record in segment.records:
                record.map(move)


def forgotten_tokens(layer: Any, tokens_to_remove: int) -> int:
    """Number of tokens that crop(tokens_to_remove) forgets of a LayerState; raises what it does."""
    seen, n = layer.seen, tokens_to_remove
    stay = n if n > 0 else seen + n
    if stay < 0:
        raise ValueError(f"crop: want at least {-seen}, all tokens that there are, got {n}")
    if stay >= seen or layer.state is None:
        return max(seen - stay, 0)
    if layer.token_states:
        if not layer.is_croppable:
            raise NotImplementedError("crop: want no MLP with a state beside a softmax layer")
    elif layer.rollback is None:
        raise RuntimeError(
            "crop: a recurrent state cannot forget tokens unless activate_past_recording() "
            "was called before they came"
        )
    else:
        layer.rollback.segments_to(stay)
    return seen - stay
