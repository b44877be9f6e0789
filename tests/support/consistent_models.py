"""Models with consistent=True: random batches and pieces, beside each sequence alone and whole."""

import random
from typing import Any

import torch
from torch import Tensor

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM, StateCache

LENGTH = 150


def model_of(*mixers: Any, **options: Any) -> SlipstreamForCausalLM:
    torch.manual_seed(0)
    if "rwkv7" in mixers:
        options.setdefault("mlps", ["rwkv7"] * len(mixers))
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 24, "num_heads": 2}
    config = SlipstreamConfig(**{**sizes, **options}, mixers=[*mixers], consistent=True)
    return SlipstreamForCausalLM(config).eval()


def sequences(count: int = 3) -> Tensor:
    return torch.randint(1, 61, (count, LENGTH), generator=torch.Generator().manual_seed(1))


def logits_of(model: SlipstreamForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    logits = model(ids, **options).logits
    assert logits is not None
    return logits


def differing(model: SlipstreamForCausalLM, trials: int) -> int:
    """Logits that differ in random batches: packed with gradients or without, padded, or a prompt
    and its rest in random pieces, of one token and more."""
    ids, rng = sequences().to(model.device), random.Random(0)
    whole = [logits_of(model, row[None])[0] for row in ids]
    wrong = 0
    for _ in range(trials):
        which = [rng.randrange(len(ids)) for _ in range(rng.randint(1, 3))]
        kind = rng.choice(["packed", "padded", "pieces"])
        ends = [rng.randint(1, LENGTH) for _ in which]
        with torch.set_grad_enabled(rng.random() < 0.3):
            if kind == "packed":
                packed = torch.cat([ids[n, :end] for n, end in zip(which, ends)])[None]
                offsets = torch.tensor([0, *ends]).cumsum(0).to(ids.device)
                found = logits_of(model, packed, cu_seqlens=offsets, use_cache=False)[0]
                parts = found.split(ends)
            elif kind == "padded":
                longest = max(ends)
                rows, masks = ids.new_zeros(2, len(which), longest)
                for i, (n, end) in enumerate(zip(which, ends)):
                    rows[i, longest - end :], masks[i, longest - end :] = ids[n, :end], 1
                found = logits_of(model, rows, attention_mask=masks, use_cache=False)
                parts = [x[longest - end :] for x, end in zip(found, ends)]
            else:
                parts = _in_pieces(model, ids[which, : ends[0]], rng)
                ends = ends[:1] * len(which)
        for n, end, part in zip(which, ends, parts):
            wrong += int((part != whole[n][:end]).sum())
    return wrong


@torch.no_grad()
def _in_pieces(model: SlipstreamForCausalLM, ids: Tensor, rng: random.Random) -> list[Tensor]:
    cache, at, parts = StateCache(len(model.model.layers)), 0, []
    while at < ids.shape[1]:
        end = at + rng.choice([1, 1, 1, 5, 64, 100])
        parts.append(logits_of(model, ids[:, at:end], cache=cache, use_cache=True))
        at = end
    return list(torch.cat(parts, 1))
