"""Greedy decoding whose steps choose their tokens themselves: the host has only graphs to replay.

Everything that a step changes is a tensor of fixed address, so that the choice of a token, the end
of a sequence and the list of tokens are parts of the graph. The host looks at one flag, of a step
two before the one that it launches; steps that ran too much are dropped.

With drafts from the prompt or an assistant, graphs of a few tokens verify them. A step takes the
last token and the drafts behind it. It first moves the states on by as many of its last call's
tokens as were right (nn/decoding.py:Drafts, mixer_step's num_accepted), so that wrong drafts cost
no copy of a state; softmax layers shorten their caches by what was wrong.

An assistant goes on in the same way: for each draft it runs over all tokens of which it is not yet
known whether they are right, so that none of them has to be taken back.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from slipstream.models import consistent, graphs, packing
from slipstream.models.cache import CACHE, StateCache
from slipstream.nn.decoding import Drafts
from slipstream.nn.linear import is_hooked

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
    room = -(-count // graphs.MULTIPLE) * graphs.MULTIPLE
    state = cache.greedy
    if state is None or not state.fits(first[:, None], at, room, eos):
        cache.graphs.clear()
        state = cache.greedy = Greedy.like(first[:, None], at, room, eos)
    state.begin(first, at, eos, pad)
    cache.reserve(count)
    decoding: graphs.Decoding = model.decoding
    steps = 1
    while steps < count and not state.ended(steps - 1):
        logits_after, key = graphs.decoding_step(model, cache)

        def step(logits_after: Any = logits_after) -> Tensor:
            state.take(logits_after(state.ids, state.positions)[:, -1].argmax(-1))
            if state.positions is not None:
                state.positions.add_(1)
            return state.ids

        decoding.run(step, cache, (), key, first.device)
        cache.step_on(1)
        steps += 1
    return state.result(steps)


# as transformers looks for them where the config does not say
NGRAM = 2
# a step without drafts: layers take a step of one token by other ways
FEWEST = 2
# of an assistant at once: each is a call of it
MAX_GUESSES = 5


def verifies(model: Any) -> bool:
    """Whether all layers of the model verify drafts in one call."""
    blocks = model.model.layers
    return not model.config.consistent and not any(
        block.shifts or block.mixer.takes_first_value or not _verifies(block.mixer)
        for block in blocks
    )


def _verifies(mixer: Any) -> bool:
    fused = mixer.verifies_drafts and mixer.mode != "chunk" and mixer.has_fused_step()
    return fused and not is_hooked(mixer) and not is_hooked(getattr(mixer, "conv", None))


def is_plain(input_ids: Tensor, attention_mask: Tensor | None, positions: Tensor | None) -> bool:
    """Whether prompts are sequences without padding, at positions from 0 on."""
    if attention_mask is not None and not bool(attention_mask.all()):
        return False
    positions = packing.text_positions(positions, *input_ids.shape)
    at = torch.arange(input_ids.shape[1], device=input_ids.device)
    return positions is None or torch.equal(positions, at.expand_as(positions))


def has_holes(attention_mask: Tensor | None) -> bool:
    """Whether padding comes after a token, as where a pad token is a word of the prompt."""
    if attention_mask is None:
        return False
    real = attention_mask.ne(0).int()
    return bool((real.diff() < 0).any())


def drafts_after(tokens: list[int], count: int, ngram: int) -> list[int]:
    """The tokens that followed the first earlier place of the longest n-gram that ends here."""
    for n in range(min(ngram, len(tokens) - 1), 0, -1):
        last, i = tokens[-n:], -1
        with suppress(ValueError):  # where there is none
            while True:
                i = tokens.index(last[0], i + 1, len(tokens) - n)
                if tokens[i : i + n] == last:
                    return tokens[i + n : i + n + count]
    return []


class Verifier:
    """Calls of a model with up to `pending` tokens after those that proved right: accept says how
    many of the last call's did, none if it is not called."""

    def __init__(self, model: Any, cache: StateCache, pending: int, device: torch.device) -> None:
        self.model, self.cache, self.device = model, cache, device
        self.drafts = _drafts_of(cache, pending)
        self.size = self.accepted = self.dropped = 0

    def __call__(self, ids: list[int], size: int) -> list[int]:
        """The token that the model chooses after each of ids, by a graph of `size` tokens."""
        cache, model = self.cache, self.model
        cache.reserve(size)

        def step(ids: Tensor, counts: Tensor) -> Tensor:
            self.drafts.accepted = counts[:1]
            for layer in cache.layers:
                if "length" in (layer.state or {}):
                    layer.view(0)["length"].sub_(counts[1])
            h = model.model.verify(ids, cache, self.drafts)
            return consistent.logits_of(model, h).argmax(-1)

        padded = [*ids, *[0] * (size - len(ids))]
        counts = [self.accepted, self.dropped]
        given = tuple(torch.tensor(x, device=self.device) for x in ([padded], counts))
        decoding: graphs.Decoding = model.decoding
        chosen = decoding.run(step, cache, given, sys.maxsize, self.device, required=True)
        self.size, self.accepted, self.dropped = size, 0, size
        return chosen[0, : len(ids)].tolist()

    def accept(self, count: int) -> None:
        self.accepted, self.dropped = count, self.size - count
        self.cache.step_on(count)


class AssistantBusy(RuntimeError):
    """The assistant already generates, for this call or in another thread."""


# Guess(tokens, count): at most count tokens that may come after these
Guess = Callable[[list[int], int], list[int]]


class Assistant:
    """Guesses of a smaller model: its greedy tokens. prompt: [1, T]. count: of guesses at most."""

    def __init__(self, model: Any, cache: StateCache, prompt: Tensor, count: int) -> None:
        model(input_ids=prompt, use_cache=True, logits_to_keep=1, **{CACHE: cache})
        self.verify = Verifier(model, cache, count + 1, prompt.device)
        # tokens that its states have, and those of its last call
        self.known, self.last = prompt.shape[1], []

    def __call__(self, tokens: list[int], count: int) -> list[int]:
        right = 0
        for mine, token in zip(self.last, tokens[self.known :]):
            if mine != token:
                break
            right += 1
        self.verify.accept(right)
        self.known += right
        new, guesses = tokens[self.known :], []
        for _ in range(count):
            self.last = [*new, *guesses]
            guesses.append(self.verify(self.last, self.verify.drafts.pending)[-1])
        return guesses


def assists(assistant: Any, model: Any) -> bool:
    """Whether a model's drafts are those of an Assistant."""
    return (
        isinstance(assistant, type(model))
        and assistant is not model
        and graphs.own_modules(assistant)
        and assistant.device == model.device
        and assistant.config.vocab_size == model.config.vocab_size
        and verifies(assistant)
        and graphs.why_not(assistant) is None
    )


@contextmanager
def assistant_of(assistant: Any, prompt: Tensor, length: int) -> Iterator[tuple[Guess, int]]:
    """Its guesses after a prompt, up to `length` tokens together, and how many at once at most.

    Raises:
        AssistantBusy: it generates elsewhere.
    """
    wanted = getattr(assistant.generation_config, "num_assistant_tokens", None) or MAX_GUESSES
    count, decoding = min(int(wanted), MAX_GUESSES), assistant.decoding
    if not decoding.begin(assistant):
        raise AssistantBusy("the assistant generates elsewhere")
    try:
        cache = decoding.lend(assistant, 1, length + count + 1)
        yield Assistant(assistant, cache, prompt, count), count
    finally:
        decoding.end()


def decode_with_drafts(
    model: Any,
    cache: StateCache,
    prompt: list[int],
    logits: Tensor,
    length: int,
    eos: Tensor | None,
    count: int,
    guess: Guess,
) -> Tensor:
    """Tokens [1, ...] after a prompt, up to `length` or the first of eos: logits [1, V] after it.

    guess: drafts, up to `count` for a call.
    """
    ends = set() if eos is None else set(eos.tolist())
    tokens = [*prompt, int(logits.float().argmax(-1))]
    verify = Verifier(model, cache, count + 1, logits.device)
    while len(tokens) < length and tokens[-1] not in ends:
        # the token after the last draft is another one
        most = min(count, length - len(tokens) - 1)
        guesses = guess(tokens, most) if most > 0 else []
        # a size that only the last token needs would be compiled and captured for it
        size = FEWEST if most > 0 and not guesses else count + 1
        chosen = verify([tokens[-1], *guesses], size)
        right = 0
        while right < len(guesses) and guesses[right] == chosen[right]:
            right += 1
        new = chosen[: right + 1]
        for i, token in enumerate(new):
            if token in ends:
                new = new[: i + 1]
                break
        tokens += new
        verify.accept(len(new))
    return torch.tensor([tokens[len(prompt) :]], device=logits.device)


def _drafts_of(cache: StateCache, pending: int) -> Drafts:
    """Drafts of the cache, whose tensors graphs have; another number, or states that have moved,
    need other graphs."""
    found: Drafts | None = cache.drafts
    each = [layer.state or {} for layer in cache.layers]
    states = [x["recurrent"] for x in each if "recurrent" in x]
    if found is not None and (found.pending != pending or not found.are_of(states)):
        cache.graphs.clear()
        found = None
    if found is None:
        found = cache.drafts = Drafts(pending)
    return found
