#!/bin/sh
# torch 2.13.0 on a CPU, transformers 5.24.0.
#
# position_ids that start again at 0 keep packed sequences apart in Llama, with "eager" and "sdpa".
# But only with use_cache=False and no attention_mask: by default a forward makes a cache, in
# training mode as well, and then, or with a mask of ones, every sequence sees those before it.
# Logits move by 0.2 in a small model of random weights, and no warning says so.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 transformers==5.24.0
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)
model = LlamaForCausalLM(config)
first, second = torch.randint(0, 64, (1, 5)), torch.randint(0, 64, (1, 7))
packed = {
    "input_ids": torch.cat([first, second], 1),
    "position_ids": torch.cat([torch.arange(5), torch.arange(7)])[None],
}
ones = torch.ones(1, 12, dtype=torch.long)
with torch.no_grad():
    alone = model(second).logits
    for training in (False, True):
        model.train(training)
        for kind in ("eager", "sdpa"):
            model.set_attn_implementation(kind)
            calls = {"default": {}, "use_cache=False": {"use_cache": False}}
            calls["ones, use_cache=False"] = {"use_cache": False, "attention_mask": ones}
            off = [
                (model(**packed, **x).logits[:, 5:] - alone).abs().max().item()
                for x in calls.values()
            ]
            print("train" if training else "eval", kind, dict(zip(calls, off)))
            assert off[0] > 0.05 and off[1] < 1e-5 and off[2] > 0.05
EOF
