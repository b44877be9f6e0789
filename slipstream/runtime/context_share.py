"""The tokens and sequences that a rank has by a plan (context_parallel.py)."""

import itertools
from bisect import bisect_right
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from slipstream.runtime import context_exchange, launch_cache
from slipstream.runtime.context_exchange import Messages, all_gather, all_to_all, gather, tie, wait


class Share:
    """One rank's tokens of sequences that go through several ranks.

    A piece is what a rank has of a sequence. Only its first, the head, may continue an earlier
    rank's, and only its last, the tail, may go on at a later one; they may be the same.
    """

    def __init__(
        self,
        rank: int,
        lengths: tuple[int, ...],
        offsets: tuple[int, ...] | None,
        group: Any = None,
        backwards: bool = False,
        segment_tokens: int | None = None,
    ) -> None:
        self.segment_tokens = segment_tokens
        self.rank, self.lengths, self.group, self.backwards = rank, lengths, group, backwards
        self.packed = offsets is not None
        # without offsets there is one sequence, of which each row of the batch has its own
        self.offsets = offsets or (0, sum(lengths))
        self.begins = tuple(itertools.accumulate(lengths, initial=0))
        self.begin, self.end = self.begins[rank : rank + 2]
        self.sequences = len(self.offsets) - 1
        # sequences with tokens here
        self.pieces = [n for n in range(self.sequences) if self._holds(rank, n)]
        name = None if group is None else group.group_name
        self._key = rank, lengths, offsets, name, backwards, segment_tokens
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        """Whether both have the same tokens among the same ranks: the key of a replayed call."""
        return isinstance(other, Share) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def reversed(self) -> "Share":
        """Returns the share where time runs backwards: the last rank is first, and so the last
        sequence."""
        total = self.offsets[-1]
        offsets = tuple(total - x for x in reversed(self.offsets)) if self.packed else None
        last = len(self.lengths) - 1
        lengths = self.lengths[::-1]
        more = not self.backwards, self.segment_tokens
        return Share(last - self.rank, lengths, offsets, self.group, *more)

    def _holds(self, rank: int, n: int) -> bool:
        return self.tokens_of(rank, n) > 0

    @cached_property
    def local_offsets(self) -> list[int]:
        """The offsets of the pieces on this rank, from 0."""
        after = [min(self.offsets[n + 1], self.end) - self.begin for n in self.pieces]
        return [0, *after]

    def expect_begin_of_segment(self) -> None:
        """Every rank begins at a multiple of `segment_tokens` after a sequence does.

        Raises:
            ValueError: one does not.
        """
        tokens = self.segment_tokens
        assert tokens is not None
        for rank, at in enumerate(self.begins[:-1]):
            begin = self.offsets[max(bisect_right(self.offsets, at) - 1, 0)]
            if at < self.offsets[-1] and (at - begin) % tokens:
                raise ValueError(
                    f"segment_tokens: rank {rank} begins {at - begin} tokens after a "
                    f"sequence does, no multiple of {tokens}; give lengths"
                )

    @property
    def others(self) -> list[int]:
        """The other ranks."""
        return [r for r in range(len(self.lengths)) if r != self.rank]

    @cached_property
    def earlier(self) -> list[int]:
        """Ranks that have tokens of the head's sequence before these, in order."""
        if not self.pieces:
            return []
        return [r for r in range(self.rank) if self._holds(r, self.pieces[0])]

    @cached_property
    def later(self) -> list[int]:
        """Ranks that have tokens of the tail's sequence after these, in order."""
        if not self.pieces:
            return []
        ranks = range(self.rank + 1, len(self.lengths))
        return [r for r in ranks if self._holds(r, self.pieces[-1])]

    @cached_property
    def passes_through(self) -> bool:
        """One sequence is all there is here, and goes on before and after."""
        return len(self.pieces) == 1 and bool(self.earlier) and bool(self.later)

    @cached_property
    def crossings(self) -> "Crossings":
        everyone = [Share(r, self.lengths, self.offsets) for r in range(len(self.lengths))]
        longest = max(len(x.earlier) for x in everyone)
        return Crossings(longest > 0, longest)

    @property
    def tail_begin(self) -> int:
        """The first local token of the tail."""
        return self.local_offsets[-2]

    @property
    def head_end(self) -> int:
        """The local token after the head."""
        return self.local_offsets[1]

    def ends_here(self, i: int) -> bool:
        """Whether the sequence of piece i has its last token here."""
        return i < len(self.pieces) - 1 or not self.later

    def begins_here(self, i: int) -> bool:
        return i > 0 or not self.earlier

    def tokens_of(self, rank: int, n: int) -> int:
        """Number of tokens of sequence n that a rank has."""
        begin, end = self.begins[rank : rank + 2]
        return max(0, min(end, self.offsets[n + 1]) - max(begin, self.offsets[n]))

    @cached_property
    def without_tokens(self) -> list[int]:
        """Sequences that no rank has any token of."""
        return [n for n in range(self.sequences) if self.offsets[n] == self.offsets[n + 1]]

    def gather(self, x: Tensor) -> list[Tensor]:
        """The tensors of all ranks in the order of their tokens; x has the same shape
        everywhere."""
        ranks = len(self.lengths)
        found = wait(all_gather(x.contiguous().flatten(), ranks, self.group))
        every = [*found.view(ranks, *x.shape).unbind(0)]
        return every[::-1] if self.backwards else every

    def start_messages(
        self, sent: list[tuple[int, Tensor]], received: list[tuple[int, Tensor]]
    ) -> Messages:
        """Starts Messages; the ranks are in the order of tokens."""
        if self.backwards:
            raise NotImplementedError("attention: is not implemented with a backward context")
        return Messages(sent, received, self.group)

    def send(self, x: Tensor, to: list[int], sizes: dict[int, int]) -> dict[int, Tensor]:
        """Sends all of x to the ranks `to`; returns sizes[r] elements from each rank r of `sizes`.

        On a GPU later kernels wait for the exchange, also where this rank only sends. Otherwise a
        kernel that takes all multiprocessors could run first, and the receiving rank would wait.
        """
        ranks = range(len(self.lengths))
        sent = [x.numel() if r in to else 0 for r in ranks]
        received = [sizes.get(r, 0) for r in ranks]
        order = -1 if self.backwards else 1
        x = x.flatten()
        x = x.repeat(len(to)) if len(to) > 1 else x
        found = wait(all_to_all(x, received[::order], sent[::order], self.group))
        return dict(zip(ranks[::order], found.split(received[::order])))

    def positions(self, device: torch.device) -> Tensor:
        """The place of each token here in its sequence, int64 [1, T]."""
        found = [
            torch.arange(n, device=device) + max(self.begin - self.offsets[i], 0)
            for i, n in ((i, self.tokens_of(self.rank, i)) for i in self.pieces)
        ]
        return torch.cat([torch.zeros(0, dtype=torch.int64, device=device), *found])[None]

    def next_tokens(self, labels: Tensor, ignored: int) -> Tensor:
        """The label after each token here [B, T], `ignored` after the last of a sequence."""
        first = labels[:, :1] if labels.shape[1] else labels.new_full((len(labels), 1), ignored)
        every = self.gather(first)
        after = every[self.later[0]] if self.later else torch.full_like(first, ignored)
        target = torch.cat([labels, after], dim=1)[:, 1:]
        for i, end in enumerate(self.local_offsets[1:]):
            if self.ends_here(i):
                target[:, end - 1] = ignored
        return target

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Gathers all ranks' tokens [B, T, ...], of x [B, tokens here, ...], with gradients."""
        most = max(self.lengths)
        padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, most - x.shape[1]))
        found = gather(padded, self)
        return torch.cat([part[:, :n] for part, n in zip(found, self.lengths)], dim=1)

    def keys_of_pieces(self, to_the_end: bool) -> tuple[int, int]:
        """Tokens of the batch from the beginning of the head's sequence to this rank's last, or to
        the end of the tail's sequence."""
        if not self.pieces:
            return 0, 0
        end = self.offsets[self.pieces[-1] + 1] if to_the_end else self.end
        return self.offsets[self.pieces[0]], end

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if launch_cache.of_thread.warmup is not None:  # of one rank: the others are not asked
            return x
        dist.all_reduce(x, group=self.group)
        return x

    def local_states(
        self, states: Tensor | None, before: Tensor | None, rows: int
    ) -> Tensor | None:
        """The initial states of this rank's pieces: `states` of all sequences, `rows` each, except
        for a head that continues an earlier rank's `before`. None is zeros."""
        if states is None and (before is None or len(self.pieces) == 1):
            return before
        like = before if before is not None else states
        assert like is not None
        blank = like.new_zeros(rows, *like.shape[1:])
        found = [
            blank if states is None else states[n * rows : (n + 1) * rows] for n in self.pieces
        ]
        if before is not None:
            found[:1] = [before]
        if not found:
            found = [blank[:0] if self.packed else blank]
        mine = torch.cat(found)
        # a gradient of `states` also where none of them begins
        return mine if states is None else tie(mine, states)

    def whole_states(self, after: Tensor, states: Tensor | None, rows: int) -> Tensor:
        """The states after all sequences, of those after this rank's pieces; `states` are those
        before all sequences. The same on every rank, and gradients there are added up."""
        blank = after.new_zeros(rows, *after.shape[1:])
        found = [blank] * self.sequences
        for i, n in enumerate(self.pieces):
            if self.ends_here(i):
                found[n] = after[i * rows : (i + 1) * rows]
        if states is not None and self.rank == 0:
            for n in self.without_tokens:
                found[n] = states[n * rows : (n + 1) * rows].to(after.dtype)
        if not found:
            return blank[:0]
        # where no sequence ends backward has a part, too
        return context_exchange.sum_of_ranks(tie(torch.cat(found), after), self)


class Crossings(NamedTuple):
    """Crossings of sequences from rank to rank: whether any goes from one rank to the next, and how
    often one does at most. The same on every rank, so that all exchange or none does."""

    any: bool
    longest: int
