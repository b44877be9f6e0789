"""generate from the cache of a prefix gives what it gives without one, in every way of decoding."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.models import PrefixCache, SlipstreamForCausalLM, StateCache
from slipstream.models.cache import CACHE
from tests.support.language_models import config, model, tokens

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 12}


def _prompt(length: int = 150) -> Tensor:
    """Words that come again, without the pad token."""
    return (tokens(1, 12) % 96 + 1).repeat(1, 13)[:, :length]


def _assistant(right: bool) -> SlipstreamForCausalLM:
    if right:
        return model("gated_deltanet")
    torch.manual_seed(1)
    return SlipstreamForCausalLM(config("gla", initializer_range=0.2)).eval()


WAYS: dict[str, Any] = {
    "greedy": lambda m: {},
    "lookup": lambda m: {"prompt_lookup_num_tokens": 3},
    "assistant": lambda m: {"assistant_model": _assistant(False)},
    "right assistant": lambda m: {"assistant_model": _assistant(True)},
    "beams": lambda m: {"num_beams": 3},
    "beams, several": lambda m: {"num_beams": 3, "num_return_sequences": 2},
    "samples": lambda m: {"do_sample": True, "num_return_sequences": 4, "top_k": 5},
    "in chunks": lambda m: {"prefill_chunk_size": 7},
    "processors": lambda m: {"repetition_penalty": 1.3, "prompt_lookup_num_tokens": 3},
}


def _generated(m: Any, ids: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(0)
    return m.generate(ids, **{**GREEDY, **options})


@pytest.mark.parametrize(
    ("name", "way", "masked"),
    [
        *(("hybrid", way, False) for way in WAYS),
        *(("gated_deltanet", way, True) for way in ("lookup", "assistant", "right assistant")),
    ],
)
def test_prefix_gives_the_same_tokens(name: str, way: str, masked: bool) -> None:
    m, ids = model(name), _prompt()
    options = WAYS[way](m)
    if masked:
        options["attention_mask"] = torch.ones_like(ids)
    want = _generated(m, ids, **options)
    cache = PrefixCache(m).prefill(ids)
    assert cache.get_seq_length() == 128
    if way == "in chunks" and CACHE != "cache":
        with pytest.raises(NotImplementedError, match="prefill_chunk_size"):
            _generated(m, ids, cache=cache, **options)
        return
    assert torch.equal(_generated(m, ids, cache=cache, **options), want)
    assert cache.get_seq_length() >= want.shape[1] - 1
    assert cache.rows == options.get("num_beams", options.get("num_return_sequences", 1))


@pytest.mark.parametrize("way", ["lookup", "assistant"])
def test_drafts_behind_a_turn_give_greedy_tokens(way: str) -> None:
    """A cache of an earlier turn, and new tokens behind it."""
    m, ids = model("hybrid"), _prompt()
    want = _generated(m, ids)
    cache = StateCache(len(m.model.layers))
    with torch.no_grad():
        m(ids[:, :100], **{CACHE: cache})
    assert torch.equal(_generated(m, ids, **{CACHE: cache}, **WAYS[way](m)), want)


def test_drafts_want_the_tokens_of_the_cache() -> None:
    """Lookup has no words to look up otherwise, and an assistant no prompt."""
    m, ids = model("hybrid"), _prompt()
    cache = PrefixCache(m).prefill(ids)
    given = {"attention_mask": torch.ones_like(ids), "prompt_lookup_num_tokens": 3}
    with pytest.raises(ValueError, match="input_ids: want the 128 tokens of the cache"):
        _generated(m, ids[:, 128:], **{CACHE: cache}, **given)


@pytest.mark.parametrize("way", ["greedy", "beams"])
def test_prefix_of_several_prompts_is_repeated_first(way: str) -> None:
    """As transformers' own caches, which refuse several prompts behind one row
    (tests/integrations/test_class_mixers.py)."""
    m, options = model("hybrid"), WAYS[way](None)
    prompts = torch.cat([_prompt().expand(2, -1), torch.tensor([[5, 6, 7], [8, 9, 3]])], 1)
    want = _generated(m, prompts, **options)
    cache = PrefixCache(m).prefill(_prompt())
    with pytest.raises(ValueError, match=r"got 1. cache.batch_repeat_interleave\(n\) repeats"):
        _generated(m, prompts, **{CACHE: cache}, **options)
    cache.batch_repeat_interleave(2)
    assert torch.equal(_generated(m, prompts, **{CACHE: cache}, **options), want)
