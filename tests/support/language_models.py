"""Small language models of every mixer, and a hybrid of some."""

import torch
from torch import Tensor

from slipstream.models import MIXERS, SlipstreamConfig, SlipstreamForCausalLM

VOCAB = 97
MODELS: dict[str, list] = {name: [name, name] for name in MIXERS}
MODELS["hybrid"] = ["gated_deltanet", "rwkv7", "attention"]


def config(name: str, **options) -> SlipstreamConfig:
    small = {"vocab_size": VOCAB, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}
    return SlipstreamConfig(**{**small, "mixers": MODELS[name], **options})


def model(name: str, **options) -> SlipstreamForCausalLM:
    """Larger weights than a fresh model's, and no zeros: a mistake in a state has to show."""
    torch.manual_seed(0)
    options = {"initializer_range": 0.2, **options}
    m = SlipstreamForCausalLM(config(name, **options)).eval()
    with torch.no_grad():
        for p in m.model.layers.parameters():
            if p.dim() > 1:
                p.add_(torch.randn_like(p), alpha=0.1)
    return m


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def assert_same(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=1e-4, atol=5e-5)
