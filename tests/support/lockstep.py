"""Ranks of context parallelism in one process: threads that run one at a time and pass each other
tensors where processes would exchange them."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.context import Call, linear_across_ranks
from slipstream.kernels.linear.inputs import DIFFERENTIABLE, ForwardCall, LinearInputs
from slipstream.runtime.context_exchange import Messages
from slipstream.runtime.context_parallel import Share
from tests.support.processes import run_all

SHARED = ("u", "initial_state", "cu_seqlens")  # by all ranks


class Meeting:
    def __init__(self, ranks: int) -> None:
        self.turn, self.barrier = threading.Lock(), threading.Barrier(ranks)
        self.brought: list[Any] = [None] * ranks

    def exchange(self, rank: int, x: Any) -> list[Any]:
        """The tensors of all ranks. Others may run meanwhile."""
        self.brought[rank] = x
        self.turn.release()
        self.barrier.wait(60)
        found = list(self.brought)
        self.barrier.wait(60)
        self.turn.acquire()
        return found


class LockstepShare(Share):
    meeting: Meeting

    def gather(self, x: Tensor) -> list[Tensor]:
        return self.meeting.exchange(self.rank, x.clone())

    def start_messages(
        self, sent: list[tuple[int, Tensor]], received: list[tuple[int, Tensor]]
    ) -> Messages:
        every = self.meeting.exchange(self.rank, [(r, x.clone()) for r, x in sent])
        to_here = {r: iter([x for to, x in every[r] if to == self.rank]) for r, _ in received}
        for rank, x in received:
            x.copy_(next(to_here[rank]))
        return Messages([], [], None)

    def send(self, x: Tensor, to: list[int], sizes: dict[int, int]) -> dict[int, Tensor]:
        every = self.meeting.exchange(self.rank, x.flatten().clone())
        assert all(every[r].numel() == n for r, n in sizes.items())
        return {r: every[r] for r in sizes}

    def add_up(self, x: Tensor) -> Tensor:
        return x.copy_(reduce(torch.add, self.meeting.exchange(self.rank, x.clone())))


def run_ranks(
    work: Callable[[Share], Any],
    lengths: Sequence[int],
    offsets: Sequence[int] | None,
    segment_tokens: int | None = None,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Any]:
    """The results of each rank's work; raises the first error of any."""
    meeting, results, errors = Meeting(len(lengths)), {}, []

    def run(rank: int) -> None:
        whole = None if offsets is None else tuple(offsets)
        share = LockstepShare(rank, tuple(lengths), whole, segment_tokens=segment_tokens)
        share.meeting = meeting
        with meeting.turn:
            try:
                with within():
                    results[rank] = work(share)
            except threading.BrokenBarrierError:
                meeting.turn.acquire()
            except Exception as error:
                errors.append(error)
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(r,)) for r in range(len(lengths))]
    run_all(threads)
    if errors:
        raise errors[0]
    return [results[r] for r in range(len(lengths))]


def linear_on_ranks(
    terms: LinearInputs,
    do: Tensor,
    dfinal: Tensor | None,
    lengths: Sequence[int],
    *,
    scale: float,
    impl: str,
    chunk: int = 32,
    segment_tokens: int | None = None,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Tensor]:
    """o, the final state, and gradients by term, put together from all ranks. Without dfinal no
    final state is asked for."""
    offsets = None if terms.cu_seqlens is None else terms.cu_seqlens.tolist()

    def work(share: Share) -> dict[str, Tensor]:
        tokens = slice(share.begin, share.end)
        given: dict[str, Any] = {
            name: (x if name in SHARED else x[:, tokens]).detach().clone().requires_grad_()
            for name, x in terms._asdict().items()
            if x is not None and name != "cu_seqlens"
        }
        cu = None
        if offsets is not None:
            cu = torch.tensor(share.local_offsets, dtype=torch.int32)
        fields: dict[str, Any] = {**given, "initial_state": None, "cu_seqlens": cu}
        mine = LinearInputs(**fields)
        call = Call(ForwardCall(scale, chunk, impl), lambda _: impl, dfinal is not None)
        o, final = linear_across_ranks(mine, given.get("initial_state"), share, call)
        loss = (o * do[:, tokens]).sum()
        found = {"o": o.detach()}
        if dfinal is not None:
            assert final is not None
            if share.rank == 0:  # one has all of it: a sum of parts is rounded
                loss = loss + (final * dfinal).sum()
            found["final"] = final.detach()
        loss.backward()
        grads = {n: x.grad for n, x in given.items()}
        return found | {n: torch.zeros_like(given[n]) if x is None else x for n, x in grads.items()}

    ranks = run_ranks(work, lengths, offsets, segment_tokens, within)
    whole = {"o": torch.cat([x["o"] for x in ranks], 1)}
    if dfinal is not None:
        for x in ranks[1:]:
            torch.testing.assert_close(x["final"], ranks[0]["final"], rtol=0, atol=0)
        whole["final"] = ranks[0]["final"]
    for name in DIFFERENTIABLE:
        if name in ranks[0]:
            parts = [x[name] for x in ranks]
            whole[name] = torch.stack(parts).sum(0) if name in SHARED else torch.cat(parts, 1)
    return whole
