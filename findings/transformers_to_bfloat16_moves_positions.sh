#!/bin/sh
# torch 2.13.0 on a CPU, transformers 5.24.0.
#
# model.to(torch.bfloat16) rounds the frequencies of rotary embeddings, a buffer, with the weights:
# 0.5623 becomes 0.5625, and at position 3000 an angle is off by 0.5. from_pretrained(dtype=bfloat16)
# keeps them in float32. A model that is cast, also one that is cast back to float32, therefore
# differs from the loaded one by more than ten times what bfloat16 weights do.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 transformers==5.24.0
cd "$dir"
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import copy
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=8192,
)
model = LlamaForCausalLM(config).eval()
for name, x in model.named_parameters():
    if "norm" not in name:
        torch.nn.init.normal_(x, std=1 if "embed" in name else 0.3)
    x.data.copy_(x.data.bfloat16())  # the weights are bfloat16's in all of them
model.save_pretrained("saved")
loaded = LlamaForCausalLM.from_pretrained("saved", dtype=torch.bfloat16).eval()
cast = copy.deepcopy(model).to(torch.bfloat16)
back = copy.deepcopy(cast).float()
ids = torch.randint(0, 64, (1, 3000))
with torch.no_grad():
    want = model(ids).logits[:, -500:]
    off = [(x(ids).logits.float()[:, -500:] - want).abs().mean().item() for x in (loaded, cast, back)]
print("from_pretrained", off[0], " to(bfloat16)", off[1], " and back to float32", off[2])
print([x.model.rotary_emb.inv_freq[1].item() for x in (model, loaded, cast, back)])
assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32
assert off[1] > 5 * off[0] and off[2] > 5 * off[0]
EOF
