"""Qwen3-Next, Kimi Linear and Mamba-2 of transformers, with random weights, and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.conversion import assert_converts, randomize

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HYBRID = {
    **SMALL,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
QWEN = {
    **HYBRID,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "mlp_only_layers": [1],
}
KIMI = {
    **HYBRID,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "num_local_experts": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
}
MAMBA = {**SMALL, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", QWEN),
    "qwen3_next-dense": ("Qwen3Next", {**QWEN, "num_experts": 0, "tie_word_embeddings": True}),
    "qwen3_next-unnormed": ("Qwen3Next", {**QWEN, "norm_topk_prob": False, "mlp_only_layers": []}),
    "kimi_linear": ("KimiLinear", KIMI),
    "kimi_linear-low rank": (
        "KimiLinear",
        {**KIMI, "q_lora_rank": 10, "n_shared_experts": 2, "norm_topk_prob": False},
    ),
    "kimi_linear-grouped": ("KimiLinear", {**KIMI, "n_group": 2, "topk_group": 1}),
    "mamba2": ("Mamba2", MAMBA),
    "mamba2-biased": (
        "Mamba2",
        {**MAMBA, "use_bias": True, "use_conv_bias": False, "time_step_limit": [0.01, 2.0]},
    ),
}


def original(name: str, **options: Any) -> Any:
    prefix, given = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**given, **options)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    randomize(model)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_model_converts_and_back(name: str, tmp_path: Path) -> None:
    assert_converts(original(name), tmp_path, name.partition("-")[0])
