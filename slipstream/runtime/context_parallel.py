"""Context parallelism: a batch whose tokens are dealt out to the ranks of a process group.

A plan is made once a batch, on the host, and says which tokens are here and which sequences go on
before and after them. Operators that take it as `context` get this rank's tokens alone; what they
exchange does not depend on how many tokens there are (docs/guides/context-parallel.md).
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
from slipstream.runtime.autograd import Function, Saved, once_differentiable


def all_to_all(found: Tensor, x: Tensor, received: list[int], sent: list[int], group: Any) -> Any:
    """Starts it, and returns what to wait for."""
    return dist.all_to_all_single(found, x, received, sent, group=group, async_op=True)


def all_gather(found: Tensor, x: Tensor, group: Any) -> Any:
    """Starts it, and returns what to wait for. torch 2.13 has it under a new name."""
    run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return run(found, x, group=group, async_op=True)


class ContextParallel:
    """How the tokens of a batch are dealt out to ranks, in the order of ranks.

    Every rank makes the plan with the same arguments, and passes it with its own tokens.

    Args:
        group: a process group, a DeviceMesh of one dimension, or None for all processes.
        cu_seqlens: offsets [N+1] of the N sequences packed in the whole batch, a tensor or a list
            of ints; None: each row of the batch is a sequence. A tensor on a device is read once,
            here, and the host waits for it.
        lengths: tokens of each rank, which may be 0; None: the same number each.
        segment_tokens: the deterministic mode: linear operators and attention give equal bits for
            any number of ranks. Sequences are computed in segments of so many tokens, a multiple
            of 64, and ranks begin where a segment does. It takes two to three times as long.

    Attributes:
        rank, size: in the group.
        sequences: in the whole batch; None without offsets, where each row is one.
        cu_seqlens: offsets of this rank's pieces of sequences, int32, on the device of the offsets
            given; None without offsets.

    Raises:
        ValueError: offsets and lengths do not fit each other, or the group's size. TypeError: they
            are no integers.
    """

    def __init__(
        self,
        group: Any = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        segment_tokens: int | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("group: torch.distributed has no process group yet")
        self.group: dist.ProcessGroup = _process_group(group)
        # under torch.compile a call with a context breaks the graph: its exchanges are not traced
        self.eagerly: Callable[..., Any] = torch.compiler.disable(_call)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if lengths is not None:
            lengths = _integers("lengths", lengths)
            if len(lengths) != self.size or min(lengths) < 0:
                raise ValueError(
                    f"lengths: want {self.size} numbers of tokens, a rank each, got {lengths}"
                )
        if segment_tokens is not None:
            (segment_tokens,) = _integers("segment_tokens", [segment_tokens])
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
            given = torch.tensor(_integers("cu_seqlens", given), dtype=torch.int64)
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
                    f"lengths: {total} tokens are not the same number for {self.size} ranks; say "
                    "how many each has"
                )
            self._lengths = (total // self.size,) * self.size
        if sum(self._lengths) != total:
            raise ValueError(
                f"lengths: want {total} tokens in all, the last of cu_seqlens, got "
                f"{sum(self._lengths)}"
            )
        self._offsets = offsets
        here = Share(self.rank, self._lengths, offsets)
        self.cu_seqlens = torch.tensor(here.local_offsets, dtype=torch.int32)
        self.cu_seqlens = self.offsets_on(given.device)

    def whole_offsets_on(self, device: torch.device) -> Tensor | None:
        """The offsets of the whole batch there, int32, as offsets_on has this rank's."""
        if self._offsets is None:
            return None
        if device not in self._whole:
            self._whole[device] = copied(torch.tensor(self._offsets, dtype=torch.int32), device)
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
            raise ValueError("cu_seqlens: the context has the offsets; want None beside it")
        if impl == "reference":
            raise ValueError("impl: the reference runs on one rank; want another beside context")

    def sum(self, x: Tensor) -> Tensor:
        """Over all ranks, without gradients."""
        x = x.detach().clone()
        dist.all_reduce(x, group=self.group)
        return x

    def repeated(self, n: int) -> "ContextParallel":
        """The same where every token is n."""
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
                f"context: {tokens} tokens are not the same number for {self.size} ranks; give "
                "lengths"
            )
        lengths = self._lengths or (tokens // self.size,) * self.size
        if sum(lengths) != tokens:
            raise ValueError(f"context: want {sum(lengths)} tokens in all, got {tokens}")
        begin = sum(lengths[: self.rank])
        return begin, begin + lengths[self.rank]

    def share(self, tokens: int) -> "Share":
        """What this rank has: so many tokens.

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

    def reversed(self) -> "Share":
        """The same where time runs backwards: the last rank is first, and so the last sequence."""
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
        """Of the pieces, from 0."""
        after = [min(self.offsets[n + 1], self.end) - self.begin for n in self.pieces]
        return [0, *after]

    @cached_property
    def segments(self) -> list["SegmentOfRank"]:
        """Of all ranks in the order of tokens, at most `segment_tokens` each, counted from the
        beginning of each sequence.

        Raises:
            ValueError: a rank begins within one.
        """
        assert self.segment_tokens is not None
        found = []
        for n in range(self.sequences):
            begin, end = self.offsets[n : n + 2]
            for number, at in enumerate(range(begin, end, self.segment_tokens)):
                stop = min(at + self.segment_tokens, end)
                rank = bisect_right(self.begins, at) - 1
                low, high = self.begins[rank : rank + 2]
                if stop > high:
                    raise ValueError(
                        f"segment_tokens: rank {rank + 1} begins {high - begin} tokens after a "
                        f"sequence does, no multiple of {self.segment_tokens}; give lengths"
                    )
                found.append(SegmentOfRank(rank, n, number, at - low, stop - low))
        return found

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
        return Crossings(any(x.earlier for x in everyone), any(x.passes_through for x in everyone))

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
        """How many of sequence n a rank has."""
        begin, end = self.begins[rank : rank + 2]
        return max(0, min(end, self.offsets[n + 1]) - max(begin, self.offsets[n]))

    @cached_property
    def without_tokens(self) -> list[int]:
        """Sequences that no rank has any token of."""
        return [n for n in range(self.sequences) if self.offsets[n] == self.offsets[n + 1]]

    def gather(self, x: Tensor) -> list[Tensor]:
        """Of every rank, in the order of its tokens; x has the same shape everywhere."""
        return self.start_gather(x).wait()

    def start_gather(self, x: Tensor) -> "Gathered":
        """That, for which nothing waits yet."""
        found, x = x.new_empty(len(self.lengths), *x.shape), x.contiguous()
        work = all_gather(found.flatten(0, 1), x, self.group)
        return Gathered(found, work, self.backwards)

    def start_exchange(self, found: Tensor, x: Tensor, received: list[int], sent: list[int]) -> Any:
        """Of x so many elements to each rank, into found so many from each; what to wait for."""
        assert not self.backwards
        return all_to_all(found, x, received, sent, self.group)

    def positions(self, device: torch.device) -> Tensor:
        """Where each token here stands in its sequence, int64 [1, T]."""
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
        """All ranks' tokens [B, T, ...], of x [B, tokens here, ...], with gradients."""
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
        dist.all_reduce(x, group=self.group)
        return x

    def local_states(
        self, states: Tensor | None, before: Tensor | None, rows: int
    ) -> Tensor | None:
        """What this rank's pieces start from: `states` of all sequences, `rows` each, but for a
        head that continues an earlier rank's `before`. None is zeros."""
        if states is None and before is None:
            return None
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
        return _SumOfRanks.apply(tie(torch.cat(found), after), self)


class SegmentOfRank(NamedTuple):
    """Tokens begin .. end - 1 of a rank: number `number` of a sequence."""

    rank: int
    sequence: int
    number: int
    begin: int
    end: int


class Gathered:
    """What every rank has sent, once it is there."""

    def __init__(self, found: Tensor, work: Any, backwards: bool) -> None:
        self._found, self._work, self._backwards = found, work, backwards

    def wait(self) -> list[Tensor]:
        """By rank, in the order of their tokens; on a GPU the stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        found = [*self._found.unbind(0)]
        return found[::-1] if self._backwards else found


class _SumOfRanks(Function):
    operator = "slipstream::context_sum"

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share) -> Tensor:
        ctx.share = share
        return share.add_up(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, grad: Tensor) -> Any:
        return ctx.share.add_up(grad.clone(memory_format=torch.contiguous_format)), None


class _Gather(Function):
    operator = "slipstream::context_gather"

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share) -> Tensor:
        ctx.share = share
        return torch.stack(share.gather(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, grad: Tensor) -> Any:
        grad = grad.clone(memory_format=torch.contiguous_format)
        return ctx.share.add_up(grad)[ctx.share.rank], None


class _Tie(Function):
    operator = "slipstream::context_tie"

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.like = [(y.shape, y.dtype, y.device) for y in others]
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, grad: Tensor) -> Any:
        return grad, *(torch.zeros(n, dtype=d, device=at) for n, d, at in ctx.like)


def gather(x: Tensor, share: Share) -> Tensor:
    """Of every rank [ranks, ...], with gradients.

    Backward is an exchange too, in which every rank has to take part: x has to be tied to inputs
    that want gradients, and a result that the rank's loss depends on to what is returned.
    """
    return _Gather.apply(x, share)


def states_of_pieces(
    x: Tensor, width: int, states: Tensor | None, share: Share
) -> tuple[Tensor | None, Tensor | None]:
    """The last `width` inputs before each of this rank's pieces [N, D, width], of x [B, T, D].

    states: those before all sequences; None is zeros. Also what `tie` has to hold, or None.
    """
    rows = 1 if share.packed else x.shape[0]
    if not share.crossings.any:
        return share.local_states(states, None, rows), None
    last = x.new_zeros(rows, x.shape[2], width)
    if share.later:
        tail = x[:, max(share.tail_begin, x.shape[1] - width) :].mT
        last = F.pad(tail, (width - tail.shape[2], 0))
    found = gather(tie(last, x), share)
    if not share.earlier:
        return share.local_states(states, None, rows), found
    n = share.pieces[0]
    before = x.new_zeros(rows, x.shape[2], width)
    if states is not None:
        before = states[n * rows : (n + 1) * rows].to(x.dtype)
    for rank in share.earlier:
        count = min(share.tokens_of(rank, n), width)
        before = torch.cat([before[..., count:], found[rank][..., width - count :]], dim=-1)
    return share.local_states(states, before, rows), found


def tie(x: Tensor, *others: Tensor) -> Tensor:
    """x; whoever's gradient comes here, the others' backward runs too."""
    return _Tie.apply(x, *others)


class Crossings:
    """Of all ranks: whether any sequence goes from one to the next, and whether any goes through a
    whole one. The same everywhere, so that all exchange or none does."""

    def __init__(self, any: bool, through: bool) -> None:
        self.any, self.through = any, through


def _call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args, **options)


def _integers(name: str, given: Iterable[Any]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, given))
    except TypeError:
        raise TypeError(f"{name}: want a sequence of integers, got {given!r}") from None


def copied(x: Tensor, device: torch.device) -> Tensor:
    """There, without the host waiting for it."""
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


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
