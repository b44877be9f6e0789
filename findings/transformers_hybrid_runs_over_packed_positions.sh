#!/bin/sh
# torch 2.13.0 on a CPU, transformers 5.24.0.
#
# Qwen3-Next and position_ids that start again at 0, without a cache and a mask: the full attention
# layers keep the sequences apart, the linear layers carry convolution and state across. So the same
# call is right for a model of attention layers and wrong, silently, for a hybrid of the same class.
# Offsets (cu_seq_lens_q) raise a ValueError instead, which names the missing package.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 transformers==5.24.0
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

torch.manual_seed(0)
first, second = torch.randint(0, 64, (1, 5)), torch.randint(0, 64, (1, 7))
ids = torch.cat([first, second], 1)
positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
offsets = torch.tensor([0, 5, 12], dtype=torch.int32)


def model_of(*layers):
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, layer_types=list(layers), num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )
    model = Qwen3NextForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def off(model):
    with torch.no_grad():
        alone = model(second, use_cache=False).logits
        got = model(ids, position_ids=positions, use_cache=False).logits[:, 5:]
    return ((got - alone).abs().max() / alone.abs().max()).item()


attention = off(model_of("full_attention", "full_attention"))
hybrid = off(model_of("linear_attention", "full_attention"))
print("off, of the largest logit: attention", attention, " hybrid", hybrid)
assert attention < 1e-5 and hybrid > 0.05
given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 7, "max_length_k": 7}
try:
    model_of("linear_attention", "full_attention")(ids, position_ids=positions, use_cache=False, **given)
except ValueError as error:
    print("offsets:", error)
else:
    raise SystemExit("offsets were taken")
EOF
