"""Layers in both directions: of sequences, and within blocks behind a causal past."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import layers
from slipstream.layers import Bidirectional
from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM

D = 24
LAYERS: dict[str, Any] = {
    "GatedDeltaNet": {"num_heads": 2},
    "KimiDeltaAttention": {"num_heads": 2},
    "GatedLinearAttention": {"num_heads": 2},
    "MultiScaleRetention": {"num_heads": 2},
    "RWKV4": {},
    "HGRN": {},
    "Mamba2": {"head_dim": 12, "state_size": 7},
    "Attention": {"num_heads": 2},
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def make(name: str) -> layers.Mixer:
    layer = getattr(layers, name)(D, **LAYERS[name])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


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
    layer = Bidirectional(make(name), block_size=4)
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
    for n in (n for n in end if n not in ("k", "v")):
        torch.testing.assert_close(state[n], end[n], rtol=1e-4, atol=1e-5)


def test_both_directions_refuse_what_they_cannot_do() -> None:
    layer, x = make("GatedDeltaNet"), torch.randn(1, 5, D)
    with pytest.raises(ValueError, match="use_cache: without block_size"):
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
