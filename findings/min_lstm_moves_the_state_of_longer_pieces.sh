#!/bin/sh
# minGRU-pytorch 0.2.1 (its minGRU and minLSTM), torch 2.13.0 (CPU).
#
# Both layers take and return a state, prev_hidden, so that a text can be read in pieces. minLSTM uses the state as
# it is where one token follows, but sends it through the activation of new values where several do, which adds 0.5
# to every positive number: a prompt in two pieces gives other outputs than the whole, one token at a time gives the
# same, and so does a last piece of one token. minGRU, of the same package and paper, has no such step.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" minGRU-pytorch==0.2.1 torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 -W ignore - <<'EOF'
import torch
from minGRU_pytorch import minGRU
from minGRU_pytorch.minLSTM import minLSTM

T = 21
CUTS = {"two pieces": [0, 8, T], "a last token alone": [0, T - 1, T], "single tokens": list(range(T + 1))}
for layer_type in (minGRU, minLSTM):
    torch.manual_seed(0)
    layer = layer_type(16).double()
    x = torch.randn(2, T, 16, dtype=torch.float64)
    with torch.no_grad():
        whole = layer(x)
        for name, cuts in CUTS.items():
            state, outputs = None, []
            for begin, end in zip(cuts, cuts[1:]):
                output, state = layer(x[:, begin:end], state, return_next_prev_hidden=True)
                outputs.append(output)
            difference = float((torch.cat(outputs, 1) - whole).abs().max())
            print(f"{layer_type.__name__}, {name}: differs from the whole by {difference:.1e}")
            assert (difference > 0.05) == (layer_type is minLSTM and name == "two pieces")
            assert difference > 0.05 or difference < 1e-9
EOF
