"""Layers in both directions: of sequences, and within blocks behind a causal past."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.layers import Bidirectional
from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.models.config import MIXERS
from tests.support.small_layers import LAYERS, D, make

every_layer = pytest.mark.parametrize("name", LAYERS)


@every_layer
def test_both_directions_of_sequences(name: str) -> None:
    layer, x = make(name), torch.randn(2, 13, D)
    want = (layer(x)[0] + layer(x.flip(1))[0].flip(1)) / 2
    torch.testing.assert_close(Bidirectional(layer)(x)[0], want, rtol=1e-4, atol=1e-5)
    both = Bidirectional(layer, combine="sum")
    packed, offsets = x.flatten(0, 1)[None], torch.tensor([0, 5, 5, 26], dtype=torch.int32)
    parts = [packed[:, :5], packed[:, 5:]]
    want = torch.cat([layer(y)[0] + layer(y.flip(1))[0].flip(1) for y in parts], 1)
    got, _ = both(packed, cu_seqlens=offsets)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@every_layer
def test_blocks_see_themselves_whole_and_the_past(name: str) -> None:
    unbounded = {"window_size": None} if "window_size" in LAYERS[name] else {}
    layer = Bidirectional(make(name, **unbounded), block_size=4)
    x = torch.randn(2, 10, D, requires_grad=True)
    y, _ = layer(x)
    for t in (0, 3, 4, 6, 9):
        (grad,) = torch.autograd.grad(y[:, t].square().sum(), x, retain_graph=True)
        seen = grad.abs().sum((0, 2)) > 0
        end = min(4 * (t // 4) + 4, 10)
        assert seen.tolist() == [s < end for s in range(10)]


@every_layer
@torch.no_grad()
def test_blocks_go_on_from_a_state(name: str) -> None:
    layer, x = Bidirectional(make(name), block_size=4), torch.randn(2, 11, D)
    whole, end = layer(x, use_cache=True)
    first, state = layer(x[:, :8], use_cache=True)
    second, state = layer(x[:, 8:], state=state, use_cache=True)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-4, atol=1e-5)
    lengths = torch.tensor([0, 8, 11])
    packed, _ = layer(x[:1], cu_seqlens=lengths)
    alone, _ = layer(x[:1, 8:])
    torch.testing.assert_close(packed[:, 8:], alone, rtol=1e-4, atol=1e-5)
    for n in (n for n in end if n not in layer.token_states):
        torch.testing.assert_close(state[n], end[n], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_size", [None, 4])
def test_first_values_go_both_ways(block_size: int | None) -> None:
    """RWKV-7's later layers read what its first returns."""
    first, later = (make(name) for name in ("RWKV7", "RWKV7-later"))
    x = torch.randn(2, 10, D)
    cuts = [0, 10] if block_size is None else [0, 4, 8, 10]

    def turned(y: Tensor) -> Tensor:
        return torch.cat([y[:, a:b].flip(1) for a, b in pairwise(cuts)], 1)

    def blocks(layer: Any, y: Tensor, value: Tensor | None) -> list[Tensor]:
        """y, and the value, of blocks from their last token to their first."""
        parts = []
        for a, b in pairwise(cuts):
            given = {} if value is None else {"first_value": value[:, a:b].flip(1)}
            part, _, own = layer(y[:, a:b].flip(1), output_value=True, **given)
            parts.append((part.flip(1), own.flip(1)))
        return [torch.cat(z, 1) for z in zip(*parts)]

    y, _, value = Bidirectional(first, block_size=block_size)(x, output_value=True)
    forth, _, own = first(x, output_value=True)
    back, other = blocks(first, x, None)
    torch.testing.assert_close(y, (forth + back) / 2, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(value, (own + other) / 2, rtol=1e-4, atol=1e-5)
    got, _ = Bidirectional(later, block_size=block_size)(x, first_value=value)
    want = (later(x, first_value=value)[0] + blocks(later, x, value)[0]) / 2
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got, Bidirectional(later, block_size=block_size)(x)[0])


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_parameter_of_both_directions_learns(mixer: str) -> None:
    both = {"type": mixer, "bidirectional": True}
    config = SlipstreamConfig(
        vocab_size=31, hidden_size=32, num_heads=2, mixers=[both, both], initializer_range=0.3
    )
    model, ids = SlipstreamForCausalLM(config), torch.randint(0, 31, (2, 11))
    model(ids, labels=ids).loss.backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_models_generate_no_tokens_in_blocks() -> None:
    """A step has one token, which would be a block of its own."""
    mixers: list[Any] = ["gla", {"type": "gla", "bidirectional": True, "block_size": 4}]
    config = SlipstreamConfig(vocab_size=31, hidden_size=16, num_heads=2, mixers=mixers)
    model, ids = SlipstreamForCausalLM(config).eval(), torch.randint(0, 31, (1, 8))
    with pytest.raises(ValueError, match=r"use_cache: want False, got True; mixers\[1\] sees"):
        model.generate(ids, max_new_tokens=3, do_sample=False)
    assert model.generate(ids, max_new_tokens=3, use_cache=False).shape == (1, 11)


def test_both_directions_refuse_what_they_cannot_do() -> None:
    layer, x = make("GatedDeltaNet"), torch.randn(1, 5, D)
    with pytest.raises(ValueError, match="use_cache: want a layer with block_size"):
        Bidirectional(layer)(x, use_cache=True)
    with pytest.raises(ValueError, match="combine: want one of"):
        Bidirectional(layer, combine="concat")
    with pytest.raises(ValueError, match="block_size: want at least 1"):
        Bidirectional(layer, block_size=0)
    assert Bidirectional(layer)(x[:, :0])[0].shape == (1, 0, D)


@pytest.mark.parametrize("block_size", [None, 4])
def test_models_have_mixers_of_both_directions(block_size: int | None) -> None:
    mixer: dict[str, Any] = {"type": "gla", "bidirectional": True}
    mixer |= {} if block_size is None else {"block_size": block_size}
    config = SlipstreamConfig(
        vocab_size=31, hidden_size=16, num_heads=2, mixers=[mixer, mixer], initializer_range=0.3
    )
    model = SlipstreamForCausalLM(config).eval()
    ids = torch.randint(0, 31, (1, 12))
    other = ids.clone()
    other[0, 6] = (ids[0, 6] + 1) % 31

    def changed(a: Tensor, b: Tensor) -> list[bool]:
        same = [model(y, use_cache=False).logits[0] for y in (a, b)]
        return (same[0] - same[1]).abs().amax(-1).gt(1e-6).tolist()

    first = 0 if block_size is None else 4
    assert changed(ids, other) == [t >= first for t in range(12)]


def test_blocks_have_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="block_size: want at least 1 token"):
        Bidirectional(make("HGRN"), block_size=0)
    y, _ = Bidirectional(make("HGRN"), block_size=1)(torch.randn(1, 3, D))
    assert y.isfinite().all()
