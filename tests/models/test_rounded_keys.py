"""A cache whose keys and values of softmax attention are in 8 bits."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM, StateCache
from slipstream.models.cache import LayerState
from tests.support.language_models import model, tokens

pytestmark = pytest.mark.usefixtures("graphs_on_a_cpu")


def generate(m: Any, ids: Tensor, **options: Any) -> Tensor:
    given = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 12, "eos_token_id": None}
    return m.generate(ids, attention_mask=torch.ones_like(ids), **given, **options)


def cache_of(m: Any) -> StateCache:
    return StateCache(len(m.model.layers), key_dtype=torch.int8)


@pytest.mark.parametrize("key_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("options", [{}, {"window_size": 5, "num_kv_heads": 1, "qk_norm": True}])
@torch.no_grad()
def test_steps_on_keys_in_8_bits(options: dict[str, Any], key_dtype: torch.dtype) -> None:
    config = SlipstreamConfig(
        vocab_size=97,
        hidden_size=64,
        mixers=[{"type": "attention", **options}, "gated_deltanet"],
        num_heads=2,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    m, ids = SlipstreamForCausalLM(config).eval(), tokens(2, 90)
    cache = StateCache(2, key_dtype=key_dtype)
    m(ids[:, :70], cache=cache)
    state = cache.layers[0].state or {}
    assert state["k"].dtype == key_dtype
    cuts = (70, 71, 72, 80, 89, 90)  # past the room for 128 at 72, one by one and several
    got = [m(ids[:, i:j], cache=cache).logits for i, j in itertools.pairwise(cuts)]
    want = m(ids).logits[:, 70:]
    bar = 1e-2 if key_dtype == torch.int8 else 4e-2
    assert (torch.cat(got, 1) - want).norm() < bar * want.norm()


@pytest.mark.parametrize("key_dtype", ["int8", "float8_e4m3fn"])
def test_generate_on_keys_in_8_bits(key_dtype: str) -> None:
    """By graphs as without; and the next call may want wide keys again."""
    m, ids = model("hybrid"), tokens(2, 9)
    plain = generate(m, ids)
    given = {"cache_config": {"key_dtype": key_dtype}}
    got = generate(m, ids, **given)
    assert m.decoding.reason is None
    assert m.decoding.caches[2].key_dtype == getattr(torch, key_dtype)
    m.decoding.enabled = False
    assert torch.equal(generate(m, ids, **given), got)
    assert generate(m, ids, **given, num_beams=2).shape == (2, 21)
    m.decoding.enabled = True
    assert torch.equal(generate(m, ids), plain)
    assert m.decoding.caches[2].key_dtype is None


@torch.no_grad()
def test_keys_in_8_bits_are_cropped_copied_and_reordered() -> None:
    m, ids = model("hybrid"), tokens(2, 16)
    cache = cache_of(m)
    cache.activate_past_recording()
    m(ids[:, :12], cache=cache)
    m(ids[:, 12:], cache=cache)
    cache.crop(-3)
    got = m(ids[:, 13:], cache=cache).logits
    want = m(ids).logits[:, 13:]
    assert (got - want).norm() < 2e-2 * want.norm()

    cache = cache_of(m)
    m(ids, cache=cache)
    pool = cache.pool(3)
    pool.put(2, cache.copy(1))
    after = cache.copy(1)
    assert pool.key_dtype == after.key_dtype == torch.int8
    step = torch.zeros(3, 1, dtype=torch.long)
    got = m(step, cache=pool).logits[2:]
    torch.testing.assert_close(got, m(step[:1], cache=after).logits, rtol=1e-4, atol=1e-4)
    cache.reorder_cache(torch.tensor([1, 1]))  # pyright: ignore[reportArgumentType]
    got = m(step[:2], cache=cache).logits
    torch.testing.assert_close(got[0], got[1])


def test_unknown_cache_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="key_dtype: want"):
        LayerState(key_dtype=torch.float16)
    with pytest.raises(ValueError, match="key_dtype: want"):
        StateCache(1, key_dtype=torch.uint8)
    m, ids = model("gla"), tokens(1, 3)
    for wrong in ({"state_dtype": "int8"}, {"bits": 8}, {"key_dtype": "fp8"}, "int8"):
        with pytest.raises(ValueError, match="cache_config: want"):
            generate(m, ids, cache_config=wrong)
