#!/bin/sh
# torch 2.13.0 (CPU).
#
# nn.MultiheadAttention(add_bias_kv=True) adds a learned key and value behind the others, which every query may see:
# a causal attn_mask gets a column for it. With is_causal=True beside the same mask and need_weights=False the mask is
# dropped and causal attention counts from the first key, so that no query reaches the added one: other outputs, and
# bias_k and bias_v have a gradient of zeros. add_zero_attn loses its key of zeros likewise. The hint is true of the
# mask, and changes nothing with need_weights=True or without these keys.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 -W ignore - <<'EOF'
import torch

T, D = 10, 16
causal = torch.ones(T, T, dtype=torch.bool).triu(1)
for option in (None, "add_bias_kv", "add_zero_attn"):
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(D, 2, batch_first=True, **({option: True} if option else {})).double()
    x = torch.randn(2, T, D, dtype=torch.float64)
    right = layer(x, x, x, attn_mask=causal, need_weights=False)[0]
    for weights in (True, False):
        layer.zero_grad()
        found = layer(x, x, x, attn_mask=causal, is_causal=True, need_weights=weights)[0]
        found.square().sum().backward()
        off = float((found - right).abs().max())
        grad = float(layer.bias_k.grad.abs().max()) if option == "add_bias_kv" else None
        print(f"{option}, need_weights={weights}: outputs up to {float(right.abs().max()):.2f} are off by {off:.1e}, "
              f"gradient of bias_k up to {grad}")
        lost = option is not None and not weights
        assert off > 0.05 if lost else off < 1e-9
        assert grad is None or (grad == 0) == lost
EOF
