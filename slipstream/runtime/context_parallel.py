"""Context parallelism: a batch whose tokens are divided among the ranks of a process group.

A plan is made once a batch, on the host, and says which tokens are here and which sequences go on
before and after them (Share). Operators that take it as `context` get this rank's tokens
alone; what they exchange (context_exchange.py) does not depend on how many tokens there are
(docs/guides/context-parallel.md).
"""

import itertools
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from slipstream.common import checks
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

    @property
    def longest(self) -> int:
        return max((y - x for x, y in itertools.pairwise(self.offsets)), default=0)

    def predicting(self, h: Tensor) -> Tensor:
        """The outputs [B, T, D] that predict what next_tokens returns, of those for all tokens."""
        return h

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

    def states_before(
        self, x: Tensor, width: int, states: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x, and the results of context_exchange.states_of_pieces."""
        return x, *context_exchange.states_of_pieces(x, width, states, self)

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


class ContextParallel:
    """The plan by which ranks, in their order, divide the tokens of a batch.

    Every rank makes the plan with the same arguments, and passes it with its own tokens.

    Args:
        group: a process group, a DeviceMesh of one dimension, or None for all processes.
        cu_seqlens: offsets [N+1] of the N sequences packed in the whole batch, a tensor or a list
            of ints; None: each row of the batch is a sequence. A tensor on a device is read once,
            here, and the host waits for it.
        lengths: tokens of each rank, which may be 0; None: the same number each.
        segment_tokens: the deterministic mode: linear operators, scans (hgrn, selective_scan) and
            attention give equal bits for any number of ranks. Sequences are computed in segments of
            so many tokens, a multiple of 64, and ranks begin where a segment does. States go from
            rank to rank one after the other.
        layout: "contiguous", since a recurrence needs tokens in their order. Attention's work is
            the same on every rank all the same.

    Attributes:
        rank, size: in the group.
        sequences: in the whole batch; None without offsets, where each row is one.
        cu_seqlens: offsets of this rank's pieces of sequences, int32, on the device of the offsets
            given; None without offsets.

    Raises:
        ValueError: offsets and lengths do not fit each other, or the group's size. TypeError: they
            are no integers. NotImplementedError: for another layout.
    """

    def __init__(
        self,
        group: Any = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        segment_tokens: int | None = None,
        layout: str = "contiguous",
    ) -> None:
        if layout != "contiguous":
            _refuse_layout(layout)
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("group: torch.distributed has no process group yet")
        self.group: dist.ProcessGroup = _process_group(group)
        # under torch.compile a call with a context breaks the graph: its exchanges are not traced
        self.eagerly: Callable[..., Any] = torch.compiler.disable(_call)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if lengths is not None:
            lengths = integers("lengths", lengths)
            if len(lengths) != self.size or min(lengths) < 0:
                raise ValueError(
                    f"lengths: want {self.size} numbers of tokens, a rank each, got {lengths}"
                )
        if segment_tokens is not None:
            (segment_tokens,) = integers("segment_tokens", [segment_tokens])
            if segment_tokens < 1:
                raise ValueError(f"segment_tokens: want at least 1, got {segment_tokens}")
        self.segment_tokens = segment_tokens
        self._lengths = lengths
        self._offsets: tuple[int, ...] | None = None
        self._shares: dict[int, Share] = {}
        self._elsewhere: dict[torch.device, Tensor] = {}
        self._whole: dict[torch.device, Tensor] = {}
        self.cu_seqlens: Tensor | None = None
        if cu_seqlens is not None:
            self._set_offsets(cu_seqlens)

    def _set_offsets(self, cu_seqlens: Tensor | Sequence[int]) -> None:
        given = cu_seqlens
        if not isinstance(given, Tensor):
            given = torch.tensor(integers("cu_seqlens", given), dtype=torch.int64, device="cpu")
        checks.expect_cu_seqlens(given, 1, 0)
        if given.is_meta:
            raise ValueError("cu_seqlens: want offsets, got a tensor on the meta device")
        offsets = tuple(given.tolist())
        if offsets[0] != 0 or any(x > y for x, y in itertools.pairwise(offsets)):
            raise ValueError(f"cu_seqlens: want offsets from 0 that never fall, got {offsets}")
        total = offsets[-1]
        if self._lengths is None:
            if total % self.size:
                raise ValueError(
                    f"lengths: want the tokens of each rank: {total} tokens are not a multiple of "
                    f"{self.size} ranks"
                )
            self._lengths = (total // self.size,) * self.size
        if sum(self._lengths) != total:
            raise ValueError(
                f"lengths: want {total} tokens in all, the last of cu_seqlens, got "
                f"{sum(self._lengths)}"
            )
        self._offsets = offsets
        here = Share(self.rank, self._lengths, offsets)
        self.cu_seqlens = torch.tensor(here.local_offsets, dtype=torch.int32, device="cpu")
        self.cu_seqlens = self.offsets_on(given.device)

    def whole_offsets_on(self, device: torch.device) -> Tensor | None:
        """The offsets of the whole batch there, int32, as offsets_on has this rank's."""
        if self._offsets is None:
            return None
        if device not in self._whole:
            offsets = torch.tensor(self._offsets, dtype=torch.int32, device="cpu")
            self._whole[device] = copied(offsets, device)
        return self._whole[device]

    def offsets_on(self, device: torch.device) -> Tensor | None:
        """cu_seqlens there, copied once without the host waiting for it."""
        if self.cu_seqlens is None or self.cu_seqlens.device == device:
            return self.cu_seqlens
        if device not in self._elsewhere:
            self._elsewhere[device] = copied(self.cu_seqlens, device)
        return self._elsewhere[device]

    def expect_no_offsets(self, cu_seqlens: Tensor | None, impl: str | None) -> None:
        """An operator that takes this takes neither offsets of its own nor the reference."""
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens: want None with a context, which has the offsets")
        if impl == "reference":
            raise ValueError("impl: the reference runs on one rank; want another beside context")

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, without gradients."""
        x = x.detach().clone()
        dist.all_reduce(x, group=self.group)
        return x

    def repeated(self, n: int) -> "ContextParallel":
        """Returns the plan where every token counts as n."""
        found = copy(self)
        found._shares, found._elsewhere, found._whole = {}, {}, {}
        if self.segment_tokens is not None:
            found.segment_tokens = n * self.segment_tokens
        found._lengths = None if self._lengths is None else tuple(n * x for x in self._lengths)
        found._offsets = None if self._offsets is None else tuple(n * x for x in self._offsets)
        found.cu_seqlens = None if self.cu_seqlens is None else n * self.cu_seqlens
        return found

    @property
    def sequences(self) -> int | None:
        return None if self._offsets is None else len(self._offsets) - 1

    def bounds(self, tokens: int) -> tuple[int, int]:
        """The first of this rank's tokens and the one after them, of `tokens` in the whole batch.

        Raises:
            ValueError: the plan says another number, or they are not as many for each rank.
        """
        if self._lengths is None and tokens % self.size:
            raise ValueError(
                f"context: want lengths: {tokens} tokens are not a multiple of {self.size} ranks"
            )
        lengths = self._lengths or (tokens // self.size,) * self.size
        if sum(lengths) != tokens:
            raise ValueError(f"context: want {sum(lengths)} tokens in all, got {tokens}")
        begin = sum(lengths[: self.rank])
        return begin, begin + lengths[self.rank]

    def share(self, tokens: int) -> "Share":
        """This rank's share of the sequences, `tokens` in all.

        Raises:
            ValueError: the plan says another number.
        """
        if tokens not in self._shares:
            lengths = self._lengths or (tokens,) * self.size
            if lengths[self.rank] != tokens:
                raise ValueError(
                    f"context: rank {self.rank} has {lengths[self.rank]} tokens, got {tokens}"
                )
            more = self.group, False, self.segment_tokens
            self._shares[tokens] = Share(self.rank, lengths, self._offsets, *more)
        return self._shares[tokens]


def _call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args, **options)


def integers(name: str, given: Iterable[Any]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, given))
    except TypeError:
        raise TypeError(f"{name}: want a sequence of integers, got {given!r}") from None


def copied(x: Tensor, device: torch.device) -> Tensor:
    """A copy on another device, without a wait of the host."""
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def _refuse_layout(layout: str) -> None:
    """
    Raises:
        NotImplementedError: for an order of tokens that others have. ValueError: for other names.
    """
    if layout == "zigzag":
        raise NotImplementedError(
            "layout: is not implemented with 'zigzag'; recurrences need each rank's tokens in one "
            "piece, and attention's work is the same on every rank with layout='contiguous'"
        )
    raise ValueError(f"layout: want 'contiguous', got {layout!r}")


def _process_group(group: Any) -> dist.ProcessGroup:
    if group is None:
        found = dist.group.WORLD
        assert found is not None
        return found
    if hasattr(group, "get_group"):
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: want a ProcessGroup or a DeviceMesh, got {type(group).__name__}")
    return group
