"""Context parallelism: a batch whose tokens are divided among the ranks of a process group.

A plan is made once a batch, on the host, and says which tokens are here and which sequences go on
before and after them (context_share.py). Operators that take it as `context` get this rank's tokens
alone; what they exchange (context_exchange.py) does not depend on how many tokens there are
(docs/guides/context-parallel.md).
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.common import checks
from slipstream.runtime.context_share import Share


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
            given = torch.tensor(_integers("cu_seqlens", given), dtype=torch.int64, device="cpu")
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


def _integers(name: str, given: Iterable[Any]) -> tuple[int, ...]:
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
