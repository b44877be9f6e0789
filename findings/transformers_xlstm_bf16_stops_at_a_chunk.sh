#!/bin/sh
# torch 2.13.0 (CPU), transformers 5.24.0; random weights.
#
# xLSTM with weights of bf16 or fp16, in training or without a cache: a text of 63 tokens runs, one of 64
# (chunk_size) or more raises RuntimeError, for a state of float32 meets values of 16 bits in a product.
# Texts below a chunk go token by token, in another function, which does not mind. With a cache, under
# autocast, or in float32 every length runs: a short trial in bf16 says nothing about a long one.
# Guessed before: a class that is loaded in bf16 trains in bf16, or fails at its first token.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 transformers==5.24.0 numpy
PYTHONPATH="$dir/lib" python3 -W ignore - <<'EOF'
import torch
from transformers import xLSTMConfig, xLSTMForCausalLM

torch.manual_seed(0)
config = xLSTMConfig(
    vocab_size=64, hidden_size=128, embedding_dim=128, num_hidden_layers=1, num_blocks=1, num_heads=2
)


def runs(dtype, tokens, cached=False, autocast=False):
    model = xLSTMForCausalLM(config).to(dtype)
    ids = torch.randint(64, (1, tokens))
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if cached:
                with torch.no_grad():
                    model.eval()(ids, use_cache=True)
            else:
                model.train()(ids, labels=ids, use_cache=False).loss.backward()
    except RuntimeError as error:
        return "dtype" not in str(error)
    return True


for dtype in (torch.float32, torch.bfloat16, torch.float16):
    found = [runs(dtype, n) for n in (1, 63, 64, 65, 200)]
    print(dtype, "trains on 1, 63, 64, 65, 200 tokens:", found)
    assert found == [True, True, *[dtype == torch.float32] * 3]
found = runs(torch.bfloat16, 200, cached=True), runs(torch.bfloat16, 200, autocast=True)
print("200 tokens of bf16 with a cache, and under autocast:", found)
assert found == (True, True)
EOF
