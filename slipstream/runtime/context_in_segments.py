"""Scans h -> decay * h + added, each element its own way, with equal bits for any number of ranks.

Sequences are cut into the plan's segments, counted from each sequence's first token, on whichever
rank that is. First, for all segments at once: what each does to a state. Then the state goes from
segment to segment and from rank to rank. Then each segment is computed from the state before it. So
the order of the arithmetic does not depend on where ranks begin; nor do gradients, which go the
same way back. It costs a second scan, of what segments do to states.

A state goes from rank to rank in rounds, one after the other, in which all ranks take part.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.runtime.autograd import Function, Saved, as_base, once_differentiable
from slipstream.runtime.context_exchange import entry_states, tie
from slipstream.runtime.context_parallel import ContextParallel, Share

# added and decay, of a segment
Change = tuple[Tensor, Tensor]


class _Way(NamedTuple):
    """Rounds in which a rank takes part; in which it sends and receives, if it does; and what."""

    rounds: range
    sends: int | None = None
    receives: int | None = None
    shape: tuple[int, ...] = (0,)


class _Relay(Function):
    """The tensor that the rank before sends, empty where there is none."""

    operator = "slipstream::context_relay"

    @staticmethod
    def forward(ctx: Any, sent: Tensor, share: Share, way: _Way) -> Tensor:
        ctx.share, ctx.way = share, way._replace(shape=tuple(sent.shape))
        return _pass(sent, share, way, share.later[:1], share.earlier[-1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, grad: Tensor) -> Any:
        share, way = ctx.share, ctx.way
        back = _Way(way.rounds[::-1], way.receives, way.sends, way.shape)
        found = _pass(grad, share, back, share.earlier[-1:], share.later[:1])
        # of what was not sent there is none
        return found if way.sends is not None else grad.new_zeros(way.shape), None, None


def _pass(x: Tensor, share: Share, way: _Way, to: list[int], source: list[int]) -> Tensor:
    nothing, received = x.new_empty(0), x.new_empty(0)
    for turn in way.rounds:
        sizes = {r: prod(way.shape) for r in source} if turn == way.receives else {}
        sends = turn == way.sends
        found = share.send(x.contiguous() if sends else nothing, to if sends else [], sizes)
        for r in sizes:
            received = found[r].view(way.shape)
    return as_base(received)


def lengths_of_segments(share: Share) -> list[list[int]]:
    """Tokens of the segments of each piece here."""
    tokens, found = share.segment_tokens, []
    assert tokens is not None
    for begin, end in zip(share.local_offsets, share.local_offsets[1:]):
        full, rest = divmod(end - begin, tokens)
        found.append([tokens] * full + [rest] * (rest > 0))
    return found


def of_segments(
    context: ContextParallel | None, call: Callable[..., Any], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Calls for tokens [B, T, ...], if the plan has segments a segment at a time:
    libraries may round a product by how many there are at once."""
    share = None if context is None else context.share(tensors[0].shape[1])
    if share is None or share.segment_tokens is None or not share.lengths[share.rank]:
        return call(*tensors)
    lengths = [*chain(*lengths_of_segments(share))]
    found = zip(*(call(*x) for x in zip(*(x.split(lengths, 1) for x in tensors))))
    return tuple(torch.cat(x, 1) for x in found)


def scan_of_rank(
    change: Callable[..., Change],
    scan: Callable[..., tuple[Tensor, Tensor]],
    tensors: Sequence[Tensor],
    states: Tensor | None,
    like: Tensor,
    share: Share,
    offsets: Tensor | None,
    others: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, ...] and the states after this rank's pieces, in the plan's segments if it has
    some, else all pieces at once.

    Args:
        change: called with some tokens of each of `tensors` and the state before them, or None:
            what they make of a state, [rows, ...].
        scan: called with the same and the offsets of its sequences, or None: outputs, and the state
            after.
        tensors: this rank's tokens [B, T, ...]. others: all further tensors with a gradient.
        states: those before all sequences, `rows` each; None is zeros.
        like: has the shape and dtype of one sequence's state, [rows, ...].
        offsets: of this rank's pieces.

    Raises:
        ValueError: a rank begins within a segment.
    """
    if share.segment_tokens is not None:
        return _scan_in_segments(change, scan, tensors, states, like, share)
    rows = like.shape[0]
    before, changes = share.local_states(states, None, rows), None
    if share.crossings.any:
        of_tail = like.new_zeros(2, *like.shape)
        if share.later:
            begins = share.begins_here(len(share.pieces) - 1)
            start = before[-rows:] if begins and before is not None else None
            of_tail = torch.stack(change(*(x[:, share.tail_begin :] for x in tensors), start))
        before, changes = entry_states(tie(of_tail, *tensors, *others), states, rows, share)
    y, after = scan(*tensors, before, offsets)
    return y if changes is None else tie(y, changes), after


def _scan_in_segments(
    change: Callable[..., Change],
    scan: Callable[..., tuple[Tensor, Tensor]],
    tensors: Sequence[Tensor],
    states: Tensor | None,
    like: Tensor,
    share: Share,
) -> tuple[Tensor, Tensor]:
    share.expect_begin_of_segment()
    lengths = lengths_of_segments(share)
    parts = iter(zip(*(x.split([*chain(*lengths)], 1) for x in tensors)))
    pieces = [[next(parts) for _ in piece] for piece in lengths]
    # what a sequence's last segment makes of a state is not read
    changes = [
        [change(*x, None) for x in (piece[:-1] if share.ends_here(i) else piece)]
        for i, piece in enumerate(pieces)
    ]
    nothing = tie(like.new_empty(0), *tensors)
    starts, passed = _states_before(changes, states, like, nothing, share)
    outputs, after = [], []
    for segments, before in zip(pieces, starts):
        for segment, state in zip(segments, before, strict=True):
            y, end = scan(*segment, state, None)
            outputs.append(y)
        after.append(end)
    if not outputs:  # no tokens
        y, end = scan(*tensors, None, None)
        outputs, after = [y], [end[:0]]
    # backward is an exchange, too, on every rank, after that of final states; and there is a
    # gradient of `states` also where none of them begins
    given = () if states is None else (states,)
    return tie(torch.cat(outputs, 1), passed, *given), tie(torch.cat(after), passed, *tensors)


def _states_before(
    changes: list[list[Change]], states: Tensor | None, like: Tensor, nothing: Tensor, share: Share
) -> tuple[list[list[Tensor | None]], Tensor]:
    """The state before each segment of each piece, None for zeros, and what results are tied to."""
    starts: list[list[Tensor | None]] = [[] for _ in changes]

    def go_through(i: int, state: Tensor | None) -> Tensor | None:
        """Advances to the state after piece i, if the sequence goes on."""
        for added, decay in changes[i]:
            starts[i].append(state)
            state = added if state is None else added + decay * state
        if share.ends_here(i):
            starts[i].append(state)
        return state

    rows, shape, end = like.shape[0], tuple(like.shape), None
    m, rounds = len(share.earlier), share.crossings.longest
    for i, n in enumerate(share.pieces):
        if i or not m:  # it begins here
            given = None if states is None else states[n * rows : (n + 1) * rows].to(like.dtype)
            end = go_through(i, given)
    if not rounds:
        return starts, nothing
    if share.passes_through:
        before = _Relay.apply(nothing, share, _Way(range(m), None, m - 1, shape))
        return starts, _Relay.apply(go_through(0, before), share, _Way(range(m, rounds), m))
    way = _Way(range(rounds), 0 if share.later else None)
    if m:
        way = way._replace(receives=m - 1, shape=shape)
    passed = _Relay.apply(end if share.later else nothing, share, way)
    if m:
        go_through(0, passed)
    return starts, passed
