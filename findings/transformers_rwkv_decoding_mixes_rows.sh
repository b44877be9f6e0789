#!/bin/sh
# torch 2.13.0 (CPU), transformers 5.24.0; random weights.
#
# RWKV-4 decodes a batch of two or more rows from a state wrongly: what stands for the token before,
# of shape [rows, channels], meets inputs of shape [rows, 1, channels], and broadcasting makes a square
# of rows of it. Each row then shifts in a token of another row: the logits of row 0 change with what
# row 1 says. No error: the shapes of the results are as they should be. One row alone is right.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 transformers==5.24.0 numpy
PYTHONPATH="$dir/lib" python3 -W ignore - <<'EOF'
import torch
from transformers import RwkvConfig, RwkvForCausalLM

torch.manual_seed(0)
config = RwkvConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, context_length=64
)
model = RwkvForCausalLM(config).eval()
for p in model.parameters():
    torch.nn.init.normal_(p, std=0.3)
tokens = torch.randint(64, (2, 9))


@torch.no_grad()
def last(rows):
    """Logits of the last token: of the text at once, and decoded on the state of what comes before."""
    whole = model(rows).logits[:, -1]
    state = model(rows[:, :-1], use_cache=True).state
    return whole, model(rows[:, -1:], state=state, use_cache=True).logits[:, -1]


for rows in (tokens[:1], tokens):
    whole, decoded = last(rows)
    off = ((decoded - whole).abs().max() / whole.abs().max()).item()
    print(len(rows), "rows: decoded logits off by", f"{off:.1e}", "shape", tuple(decoded.shape))
    assert off < 1e-5 if len(rows) == 1 else off > 0.1
whole, decoded = last(tokens)
other = torch.cat([tokens[:1], torch.randint(64, (1, 9))])
moved = (last(other)[1][0] - decoded[0]).abs().max().item()
print("row 0 changes by", f"{moved:.1e}", "with what row 1 says")
assert moved > 0.1
EOF
