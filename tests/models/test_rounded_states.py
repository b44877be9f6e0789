"""A cache whose recurrent states are in int8, with what rounding leaves over."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.layers import GatedDeltaNet
from slipstream.models import PrefixCache, SlipstreamConfig, SlipstreamForCausalLM, StateCache
from slipstream.models.cache import LayerState
from slipstream.nn import rounded
from slipstream.nn.rounded import Rounding
from tests.support.language_models import model, tokens

pytestmark = pytest.mark.usefixtures("graphs_on_a_cpu")

INT8 = {"state_dtype": "int8"}
# stepping on int8 in one launch or by recurrent_step, by their forward, and without such a state
NAMES = ("gated_deltanet", "mamba2", "rwkv7", "retention", "gated_oja", "rwkv6", "hybrid", "hgrn")


def generate(m: Any, ids: Tensor, **options: Any) -> Tensor:
    given = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 12, "eos_token_id": None}
    return m.generate(ids, attention_mask=torch.ones_like(ids), **given, **options)


def cache_of(m: Any, **options: Any) -> StateCache:
    return StateCache(len(m.model.layers), state_dtype=torch.int8, **options)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_steps_on_int8_states(name: str) -> None:
    """One by one and several at once, in place, near those on float32's."""
    m, ids = model(name), tokens(2, 24)
    cache = cache_of(m, max_length=40)
    m(ids[:, :10], cache=cache)
    at = [x.data_ptr() for layer in cache.layers for x in (layer.state or {}).values()]
    assert any(layer.rounds for layer in cache.layers) == (name != "hgrn")
    cuts = (10, 11, 12, 15, 16, 24)
    got = [m(ids[:, i:j], cache=cache).logits for i, j in itertools.pairwise(cuts)]
    want = m(ids).logits[:, 10:]
    error = (torch.cat(got, 1) - want).norm() / want.norm()
    assert error < (1e-5 if name == "hgrn" else 2e-2)
    assert at == [x.data_ptr() for layer in cache.layers for x in (layer.state or {}).values()]


@pytest.mark.parametrize("name", ["gated_deltanet", "rwkv7", "hybrid", "gated_oja"])
def test_generate_on_int8_states(name: str) -> None:
    """By graphs as without; and the next call may want float32's again."""
    m, ids = model(name), tokens(2, 9)
    plain = generate(m, ids)
    got = generate(m, ids, cache_config=INT8)
    assert m.decoding.reason is None
    assert m.decoding.captures == 2
    assert m.decoding.caches[2].rounding.states == torch.int8
    m.decoding.enabled = False
    assert torch.equal(generate(m, ids, cache_config=INT8), got)
    m.decoding.enabled = True
    assert torch.equal(generate(m, ids), plain)
    assert m.decoding.caches[2].rounding == Rounding()


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
    cache = cache_of(m, key_dtype=key_dtype)
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
    m, ids = model("hybrid"), tokens(2, 9)
    given = {"cache_config": {"key_dtype": key_dtype, **INT8}}
    got = generate(m, ids, **given)
    assert m.decoding.reason is None
    assert m.decoding.captures == 1
    m.decoding.enabled = False
    assert torch.equal(generate(m, ids, **given), got)
    got = generate(m, ids, **given, num_beams=2)
    assert got.shape == (2, 21)


def test_drafts_on_int8_states() -> None:
    m = model("gated_deltanet")
    ids = tokens(1, 6).repeat(1, 3)
    want = generate(m, ids, cache_config=INT8)
    got = generate(m, ids, cache_config=INT8, prompt_lookup_num_tokens=3)
    assert m.decoding.reason is None
    assert torch.equal(got, want)


@torch.no_grad()
def test_int8_states_are_cropped_copied_and_reordered() -> None:
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
    assert pool.rounding == after.rounding == Rounding(torch.int8)
    step = torch.zeros(3, 1, dtype=torch.long)
    got = m(step, cache=pool).logits[2:]
    torch.testing.assert_close(got, m(step[:1], cache=after).logits, rtol=1e-4, atol=1e-4)
    cache.reorder_cache(torch.tensor([1, 1]))  # pyright: ignore[reportArgumentType]
    got = m(step[:2], cache=cache).logits
    torch.testing.assert_close(got[0], got[1])


@torch.no_grad()
def test_int8_states_of_prefixes() -> None:
    m, ids = model("gated_deltanet"), tokens(1, 150)
    cache = PrefixCache(m, state_dtype=torch.int8).prefill(ids)
    assert cache.rounding == Rounding(torch.int8)
    assert cache.get_seq_length() == 128
    got, want = m(ids[:, 128:], cache=cache).logits, m(ids).logits[:, 128:]
    assert (got - want).norm() < 2e-2 * want.norm()


def test_int8_states_have_a_third_of_the_bytes() -> None:
    config = SlipstreamConfig(
        vocab_size=8,
        hidden_size=32,
        mixers=[{"type": "gated_deltanet", "head_dim": 128}],
        num_heads=2,
    )
    m, ids = SlipstreamForCausalLM(config).eval(), torch.ones(2, 3, dtype=torch.long)
    caches = StateCache(1), cache_of(m)
    with torch.no_grad():
        for cache in caches:
            m(ids, cache=cache)
    conv = (caches[0].layers[0].state or {})["conv"].nbytes
    plain, small = (cache.bytes() - conv for cache in caches)
    assert small / plain == (11 + 16 / 128) / 32


@torch.no_grad()
def test_layer_steps_on_int8_states() -> None:
    layer = GatedDeltaNet(32, 2).eval()
    x = torch.randn(2, 6, 32)
    _, state = layer(x[:, :4], use_cache=True)
    state = rounded.rounded(state, Rounding(torch.int8))
    got = torch.cat([layer.step(x[:, 4:5], state), layer.step(x[:, 5:], state)], 1)
    want = layer(x)[0][:, 4:]
    assert (got - want).norm() < 1e-2 * want.norm()


def test_gradients_want_wide_states() -> None:
    """A cache in int8 whose states are wanted with gradients keeps them as they are."""
    m, ids = model("gated_deltanet"), tokens(1, 8)
    cache = cache_of(m)
    m(ids[:, :5], cache=cache)
    m(ids[:, 5:], cache=cache).logits.sum().backward()
    assert not any(layer.rounds for layer in cache.layers)
    assert m.get_parameter("model.layers.0.mixer.qkv_proj.weight").grad is not None


@pytest.mark.parametrize("name", ["gated_deltanet", "hybrid"])
def test_cache_rounds_after_a_call_with_gradients(name: str) -> None:
    """Once a call wants none; so do copies of a row and pools."""
    m, ids = model(name), tokens(1, 12)
    cache = StateCache(len(m.model.layers), None, torch.int8, torch.int8)
    m(ids[:, :5], cache=cache)
    assert not any(layer.rounds for layer in cache.layers)
    copied, pool = cache.copy(), cache.pool(2)
    assert all(layer.rounds for x in (copied, pool) for layer in x.layers)
    with torch.no_grad():
        found = [m(ids[:, 5:], cache=x).logits for x in (cache, copied)]
        want = m(ids).logits[:, 5:]
    assert all(layer.rounds for layer in cache.layers)
    for logits in found:
        assert (logits - want).norm() < 2e-2 * want.norm()


def test_unknown_cache_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="state_dtype: want"):
        LayerState(state_dtype=torch.float16)
    with pytest.raises(ValueError, match="key_dtype: want"):
        StateCache(1, key_dtype=torch.uint8)
    m, ids = model("gla"), tokens(1, 3)
    for wrong in ({"state_dtype": "int4"}, {"bits": 8}, {"key_dtype": "fp8"}, "int8"):
        with pytest.raises(ValueError, match="cache_config: want"):
            generate(m, ids, cache_config=wrong)
