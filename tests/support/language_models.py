"""Small language models of every mixer, a hybrid of some, and models of other parts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.models import MIXERS, SlipstreamConfig, SlipstreamForCausalLM

VOCAB = 97
MODELS: dict[str, list] = {name: [name, name] for name in MIXERS}
MODELS["hybrid"] = ["gated_deltanet", "rwkv7", "attention"]
# one of each kind of state: recurrent, with a convolution, a shift, a value of an earlier layer's,
# positions, two states, none that is fixed, latents
KINDS = ("gla", "gated_deltanet", "rwkv7", "retention", "gsa", "attention", "mla", "hybrid")
every_kind = pytest.mark.parametrize("name", KINDS)
_MOE = {"moe_intermediate_size": 8, "num_experts": 3, "num_experts_per_tok": 2}
# MLPs, norms, the norm after the embedding, and residuals that a config can choose
PARTS: dict[str, dict[str, Any]] = {
    "rwkv7 blocks": {
        "mixers": ["rwkv7", "attention"],
        "mlps": ["rwkv7", {"type": "rwkv7", "intermediate_size": 24}],
        "norm": "layer",
        "embedding_norm": True,
    },
    "mamba2 blocks": {
        "mixers": ["mamba2", "gla"],
        "mlps": ["none", "swiglu"],
        "residual_in_fp32": True,
    },
    "qwen3_next": {
        "mixers": ["gated_deltanet", "attention"],
        "mlps": [
            "swiglu",
            {"type": "qwen3_next_moe", "shared_expert_intermediate_size": 8, **_MOE},
        ],
        "norm": "zero_centered_rms",
    },
    "kimi_linear": {
        "mixers": ["kda", "gla"],
        "mlps": [{"type": "kimi_linear_moe", **_MOE}, "none"],
        "norm": "layer_without_bias",
    },
    "attention residuals": {"mixers": ["gla", "attention", "gla"], "attention_residuals": 1},
    "in groups": {"mixers": ["gla"] * 5, "attention_residuals": 2, "residual_in_fp32": True},
}

_OPTIONS: dict[str, dict[str, Any]] = {
    "mla": {"kv_lora_rank": 10, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 8},
    "mamba2": {"state_size": 8},
    "dsa": {"topk": 5, "index_heads": 2, "index_dim": 6},
    "qsa": {"block": 4, "topk": 2, "index_dim": 16},
    "msa": {"block": 4, "topk": 3, "index_dim": 16},
}
_OPTIONS["dsa"] |= _OPTIONS["mla"]
# layers of 16 channels or a few more, by their mixers
INDEXED = ("dsa", "msa", "qsa")
LAYERS = {name: {"type": name, **_OPTIONS.get(name, {})} for name in MIXERS}


def small_model(mixers: list[Any], **options: Any) -> SlipstreamForCausalLM:
    """With the same weights each time."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    return SlipstreamForCausalLM(SlipstreamConfig(mixers=mixers, **{**sizes, **options}))


def config(name: str, **options) -> SlipstreamConfig:
    small: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_heads": 2}
    small |= {"intermediate_size": 48, **(PARTS.get(name) or {"mixers": MODELS[name]})}
    return SlipstreamConfig(**{**small, **options})


def model(name: str, **options) -> SlipstreamForCausalLM:
    """Larger weights than a fresh model's, and no zeros: a mistake in a state has to show."""
    torch.manual_seed(0)
    options = {"initializer_range": 0.2, **options}
    m = SlipstreamForCausalLM(config(name, **options)).eval()
    with torch.no_grad():
        for p in (m if name in PARTS else m.model.layers).parameters():
            if p.dim() > 1 or name in PARTS:
                p.add_(torch.randn_like(p), alpha=0.1)
    return m


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def assert_same(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=1e-4, atol=5e-5)


def generate(m: SlipstreamForCausalLM, ids: Tensor, **options: Any) -> Any:
    """Greedily, nine tokens if nothing else is said."""
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 9, "do_sample": False}
    return m.generate(input_ids=ids, **{**given, "pad_token_id": 0, **options})


def without_graphs(m: SlipstreamForCausalLM, ids: Tensor, **options: Any) -> Any:
    m.decoding.enabled = False
    try:
        return generate(m, ids, **options)
    finally:
        m.decoding.enabled = True
