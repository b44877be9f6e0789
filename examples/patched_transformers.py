"""Runs transformers' own model on Slipstream's operators: python examples/patched_transformers.py

Qwen3-Next has three layers of the gated delta rule for each of softmax attention. patch() replaces
the functions of the former; attn_implementation="slipstream" those of the latter. The weights stay
where they are.
"""

from typing import Any

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from slipstream.integrations.transformers import patch, unpatch


def small_model() -> Any:
    config: Any = Qwen3NextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    return Qwen3NextForCausalLM(config).eval()


def main() -> float:
    """Returns the largest difference between the logits with and without slipstream."""
    torch.manual_seed(0)
    model, ids = small_model(), torch.randint(1, 64, (2, 50))
    with torch.no_grad():
        before = model(ids).logits
        replaced = patch(model)
        model.set_attn_implementation("slipstream")
        try:
            after = model(ids).logits
            # decoding keeps its state in transformers' own cache
            text = model.generate(ids[:, :10], max_new_tokens=8, do_sample=False, pad_token_id=0)
        finally:
            unpatch()
    apart = (after - before).abs().max().item()
    print(f"replaced: {', '.join(replaced)}")
    print(f"largest difference of the logits: {apart:.1e}; generated {text[0, 10:].tolist()}")
    return apart


if __name__ == "__main__":
    main()
