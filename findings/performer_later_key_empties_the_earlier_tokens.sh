#!/bin/sh
# performer-pytorch 1.1.4, torch 2.13.0 (CPU).
#
# Its attention with causal=True lets a token read what follows, through the features of the keys: they are exponentials
# less the largest of all positions and features, and 1e-4 is added to each, so the common factor does not cancel. One
# longer key at the end of a text presses the features of all keys before it down to the 1e-4, and every earlier token
# gets the plain mean of the values up to it, whatever it asked for. The features of generalized_attention=True, which
# have no such maximum, are causal.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" performer-pytorch==1.1.4 torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 -W ignore - <<'EOP'
import torch
from performer_pytorch import FastAttention

T = 32
for generalized in (False, True):
    torch.manual_seed(0)
    layer = FastAttention(16, nb_features=64, causal=True, generalized_attention=generalized).eval()
    q, k, v = (torch.randn(1, 2, T, 16) for _ in range(3))
    mean = v.cumsum(2) / torch.arange(1, T + 1)[:, None]
    for factor in (1, 3, 8):
        longer = torch.cat([k[:, :, :-1], factor * k[:, :, -1:]], 2)
        with torch.no_grad():
            first, second = layer(q, k, v), layer(q, longer, v)
        moved = float((second - first)[:, :, :-1].abs().max())
        from_mean = float((second - mean)[:, :, :-1].abs().max())
        print(f"{'generalized' if generalized else 'softmax'} features, last key times {factor}: tokens before it "
              f"move by {moved:.2g} and differ from the mean of the values by {from_mean:.2g}")
        assert moved < 1e-5 if generalized or factor == 1 else moved > 0.5
        assert generalized or factor < 8 or from_mean < 0.3
        assert not generalized and factor == 8 or from_mean > 0.5
EOP
