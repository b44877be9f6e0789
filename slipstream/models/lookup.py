"""Greedy decoding with drafts from the prompt, verified by graphs of a few tokens.

A step takes the last token and the drafts behind it. It first moves the states on by as many of its
last call's tokens as were right (nn/decoding.py:Drafts, mixer_step's num_accepted), so that wrong
drafts cost no copy of a state; softmax layers shorten their caches by what was wrong.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from slipstream.models.cache import StateCache
from slipstream.models.graphs import MULTIPLE, Decoding
from slipstream.models.packing import text_positions
from slipstream.nn.decoding import Drafts
from slipstream.nn.linear import is_hooked

# as transformers looks for them where the config does not say
NGRAM = 2
# a step without drafts: layers take a step of one token by other ways
FEWEST = 2


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
    """Whether a prompt is one sequence without padding, at positions from 0 on."""
    if input_ids.shape[0] != 1 or (attention_mask is not None and not bool(attention_mask.all())):
        return False
    positions = text_positions(positions, *input_ids.shape)
    at = torch.arange(input_ids.shape[1], device=input_ids.device)
    return positions is None or torch.equal(positions, at[None])


def drafts_after(tokens: list[int], count: int, ngram: int) -> list[int]:
    """What came after the last n-gram where it was before; the longest n-gram, the first place."""
    for n in range(min(ngram, len(tokens) - 1), 0, -1):
        last, i = tokens[-n:], -1
        with suppress(ValueError):  # where there is none
            while True:
                i = tokens.index(last[0], i + 1, len(tokens) - n)
                if tokens[i : i + n] == last:
                    return tokens[i + n : i + n + count]
    return []


def decode(
    model: Any,
    cache: StateCache,
    prompt: list[int],
    logits: Tensor,
    length: int,
    eos: Tensor | None,
    count: int,
    ngram: int,
) -> Tensor:
    """Tokens [1, ...] after a prompt, up to `length` or the first of eos: logits [1, V] after it.

    count: drafts of a call at most. ngram: tokens that are looked for.
    """
    device = logits.device
    ends = set() if eos is None else set(eos.tolist())
    tokens = [*prompt, int(logits.float().argmax(-1))]
    decoding: Decoding = model.decoding
    drafts = _drafts_of(cache, count + 1)
    accepted, dropped = 0, 0
    while len(tokens) < length and tokens[-1] not in ends:
        # the token after the last draft is another one
        most = min(count, length - len(tokens) - 1)
        guesses = drafts_after(tokens, most, ngram) if most > 0 else []
        size = count + 1 if guesses else FEWEST
        ids = [tokens[-1], *guesses]
        ids += [0] * (size - len(ids))
        cache.reserve(size)
        places = _places(cache, size, device)

        def step(ids: Tensor, counts: Tensor, places: int = places) -> Tensor:
            drafts.accepted = counts[:1]
            for layer in cache.layers:
                if "length" in (layer.state or {}):
                    layer.view(0)["length"].sub_(counts[1])
            h = model.model.verify(ids, cache, drafts, places)
            return model.lm_head(h).argmax(-1)

        given = torch.tensor([ids], device=device), torch.tensor([accepted, dropped], device=device)
        chosen = decoding.run(step, cache, given, places, device, required=True)[0].tolist()
        right = 0
        while right < len(guesses) and guesses[right] == chosen[right]:
            right += 1
        new = chosen[: right + 1]
        for i, token in enumerate(new):
            if token in ends:
                new = new[: i + 1]
                break
        tokens += new
        accepted, dropped = len(new), size - len(new)
        cache.step_on(len(new))
    return torch.tensor([tokens[len(prompt) :]], device=device)


def _drafts_of(cache: StateCache, pending: int) -> Drafts:
    """Those of the cache, whose tensors graphs have; another number, or states that have moved,
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


def _places(cache: StateCache, size: int, device: torch.device) -> int:
    """As graphs.py:room_of_graph, with room for `size` more tokens."""
    if device.type == "cuda":
        return 1 << 62
    end = cache.get_seq_length() + size
    return -(-end // MULTIPLE) * MULTIPLE if cache.grows else 0
