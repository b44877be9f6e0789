#!/bin/sh
# torch 2.13.0 on a CPU, transformers 5.24.0, peft 0.21.2.
#
# LoRA on embed_tokens of a model with tied embeddings: while it trains, only the embedding has the
# adapter, the head multiplies by the plain table. merge_and_unload adds the factors to the table,
# and the head, which is the same tensor, gets them as well. The merged model gives other logits than
# the one that was trained. In a model that is not tied they agree.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 transformers==5.24.0 peft==0.21.2
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def off(tied):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=tied,
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["embed_tokens"]))
    model.eval()
    for name, parameter in model.named_parameters():
        if "lora_embedding" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        trained = model(ids).logits
        merged = model.merge_and_unload()(ids).logits
    return ((merged - trained).abs().max() / trained.abs().max()).item()


tied, untied = off(True), off(False)
print("merged beside trained, of the largest logit: tied", tied, " not tied", untied)
assert tied > 0.1 and untied < 1e-4
EOF
