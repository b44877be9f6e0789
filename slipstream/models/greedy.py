"""Greedy decoding whose steps choose their tokens themselves: the host has only graphs to replay.

Everything that a step changes is a tensor of fixed address, so that the choice of a token, the end
of a sequence and the list of tokens are parts of the graph. The host looks at one flag, of a step
two before the one that it launches; steps that ran too much are dropped.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from slipstream.models.cache import StateCache
from slipstream.models.graphs import MULTIPLE, Decoding, decoding_step

# steps on their way while the host looks at the flag
AHEAD = 2


@dataclass
class Greedy:
    """The buffers that steps for N sequences read and write.

    ids: [N, 1], the last tokens. positions: [N, 1] or None. tokens: [N, L], those so far.
    at: [1], how many. unfinished: [N]. done: whether none is, where the host can read it.
    eos: tokens that end a sequence, or None. pad: [1], what follows the end.
    """

    ids: Tensor
    positions: Tensor | None
    tokens: Tensor
    at: Tensor
    unfinished: Tensor
    done: Tensor
    eos: Tensor | None
    pad: Tensor
    events: list[Any] = field(default_factory=list)

    @staticmethod
    def like(ids: Tensor, positions: Tensor | None, room: int, eos: Tensor | None) -> "Greedy":
        N, on_device = ids.shape[0], ids.is_cuda
        return Greedy(
            ids.new_zeros(N, 1),
            None if positions is None else positions.clone(),
            ids.new_zeros(N, room),
            ids.new_zeros(1),
            torch.ones(N, dtype=torch.bool, device=ids.device),
            torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=on_device),
            None if eos is None else eos.clone(),
            ids.new_zeros(1),
            [torch.cuda.Event() for _ in range(AHEAD)] if on_device else [],
        )

    def fits(self, ids: Tensor, positions: Tensor | None, room: int, eos: Tensor | None) -> bool:
        own = self.ids, self.positions, self.eos
        same = [_like(x) for x in own] == [_like(x) for x in (ids, positions, eos)]
        return same and room <= self.tokens.shape[1]

    def begin(self, first: Tensor, positions: Tensor | None, eos: Tensor | None, pad: Any) -> None:
        """Starts from the tokens `first` [N] after the prompt, at `positions`."""
        self.at.zero_()
        self.unfinished.fill_(True)
        self.done.fill_(False)
        for own, x in ((self.positions, positions), (self.eos, eos)):
            if own is not None and x is not None:
                own.copy_(x)
        if self.eos is not None:
            self.pad.copy_(pad)
        self.take(first)

    def take(self, tokens: Tensor) -> None:
        """Takes the next tokens [N]."""
        if self.eos is not None:
            tokens = torch.where(self.unfinished, tokens, self.pad)
            self.unfinished.logical_and_((tokens[:, None] != self.eos).all(1))
            self.done.copy_(~self.unfinished.any(), non_blocking=True)
        self.ids.copy_(tokens[:, None])
        self.tokens.index_copy_(1, self.at, self.ids)
        self.at.add_(1)

    def ended(self, step: int) -> bool:
        """Whether all sequences have ended, AHEAD steps before this one at the latest."""
        if self.eos is None:
            return False
        if self.events:
            event = self.events[step % AHEAD]
            if step >= AHEAD:
                event.synchronize()
            ended = bool(self.done)
            event.record()
            return ended
        return bool(self.done)

    def result(self, steps: int) -> Tensor:
        """The tokens [N, ...] up to the one at which the last sequence ends."""
        tokens = self.tokens[:, :steps].clone()
        if self.eos is None:
            return tokens
        ends = (tokens[..., None] == self.eos).any(-1)
        last = torch.where(ends.any(1), ends.int().argmax(1) + 1, steps).max()
        return tokens[:, : int(last)]


def _like(x: Tensor | None) -> Any:
    return None if x is None else (x.shape, x.dtype, x.device)


def criteria(stopping_criteria: Any) -> tuple[int, Tensor | None] | None:
    """The largest length and the tokens that end a sequence; None if there is any other."""
    last, eos = None, None
    for criterion in stopping_criteria:
        if type(criterion) is MaxLengthCriteria:
            last = criterion.max_length
        elif type(criterion) is EosTokenCriteria:
            eos = criterion.eos_token_id
        else:
            return None
    return None if last is None else (last, eos)


def decode(
    model: Any,
    cache: StateCache,
    logits: Tensor,
    positions: Tensor | None,
    count: int,
    eos: Tensor | None,
    pad: Any,
) -> Tensor:
    """Up to `count` tokens [N, ...]: logits [N, V] after a prompt, positions [N, 1] of its end."""
    first = logits.float().argmax(-1)
    at = None if positions is None else positions + 1
    eos = None if eos is None else eos.to(first.device)
    room = -(-count // MULTIPLE) * MULTIPLE
    state = cache.greedy
    if state is None or not state.fits(first[:, None], at, room, eos):
        cache.graphs.clear()
        state = cache.greedy = Greedy.like(first[:, None], at, room, eos)
    state.begin(first, at, eos, pad)
    cache.reserve(count)
    decoding: Decoding = model.decoding
    steps = 1
    while steps < count and not state.ended(steps - 1):
        logits_after, key = decoding_step(model, cache)

        def step(logits_after: Any = logits_after) -> Tensor:
            state.take(logits_after(state.ids, state.positions)[:, -1].argmax(-1))
            if state.positions is not None:
                state.positions.add_(1)
            return state.ids

        decoding.run(step, cache, (), key, first.device)
        cache.step_on(1)
        steps += 1
    return state.result(steps)
