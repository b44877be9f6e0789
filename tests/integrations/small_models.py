"""Small models of transformers, with its eager attention and with ours."""

import copy
from typing import Any

import torch
import transformers

from slipstream.integrations.transformers import NAME

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "gemma2": ("Gemma2", {"sliding_window": 6, "attn_logit_softcapping": 3.0}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "gpt_oss": ("GptOss", {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1}),
}


def make(name: str, **options: Any) -> tuple[Any, Any]:
    """The same model with "eager" and with ours."""
    prefix, given = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(
        **SIZES, **given, **options, attn_implementation="eager"
    )
    eager = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.copy_(0.2 * torch.randn_like(parameter))
    slip = copy.deepcopy(eager)
    slip.set_attn_implementation(NAME)  # importing it has registered it
    return eager, slip
