#!/bin/sh
# x-transformers 2.31.10, torch 2.13.0 (CPU).
#
# attn_orthog_projected_values takes from the outputs of attention what is parallel to the values. The direction is
# that of the whole row, all its tokens and channels as one vector, not one for each token. So a causal Decoder shows
# a token what comes after it: changing the last three tokens changes the logits of all before them, and a prompt's
# last logits change when the text goes on. Training sees its labels, where decoding cannot.
# The same model without the option is causal to the bit.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" x-transformers==2.31.10 torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 -W ignore - <<'EOF'
import torch
from x_transformers import Decoder, TransformerWrapper

for options in ({}, {"attn_orthog_projected_values": True}, {"attn_orthog_projected_values_per_head": True}):
    torch.manual_seed(0)
    layers = Decoder(dim=64, depth=2, heads=2, attn_dim_head=32, **options)
    model = TransformerWrapper(num_tokens=50, max_seq_len=128, attn_layers=layers).eval()
    tokens = torch.randint(0, 50, (1, 24))
    other = tokens.clone()
    other[:, 21:] = (other[:, 21:] + 1) % 50
    with torch.no_grad():
        change = float((model(tokens) - model(other))[:, :21].abs().max())
        longer = float((model(tokens)[:, 11] - model(tokens[:, :12])[:, -1]).abs().max())
    print(f"{options or 'plain'}: earlier logits change by {change:.3f} with later tokens, by {longer:.3f} with more")
    assert (change == 0.0) == (not options) and (longer < 1e-5) == (not options)
EOF
