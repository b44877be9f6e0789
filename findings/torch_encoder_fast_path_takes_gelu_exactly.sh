#!/bin/sh
# torch 2.13.0 (CPU).
#
# TransformerEncoderLayer(activation=nn.GELU(approximate="tanh")) trains with the approximation, and evaluates under
# no_grad with the exact GELU: its fast path tests the class of the module alone and then has one GELU. Outputs in
# evaluation depend on whether gradients are recorded, by what the two functions differ, also in float64; they are
# those of a layer that has nn.GELU(). An activation that is a function, a lambda of the same, is not taken for it.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 -W ignore - <<'EOF'
import torch
from torch import nn

torch.manual_seed(1)
x = torch.randn(2, 10, 16, dtype=torch.float64)


def layer(activation):
    torch.manual_seed(0)
    made = nn.TransformerEncoderLayer(16, 2, 64, 0.0, activation, batch_first=True, norm_first=True)
    return made.double().eval()


tanh = nn.GELU(approximate="tanh")
with torch.no_grad():
    exact = layer(nn.GELU())(x)
for name, activation in (("exact", nn.GELU()), ("tanh", tanh), ("tanh in a lambda", lambda z: tanh(z))):
    made = layer(activation)
    recorded = made(x)
    with torch.no_grad():
        off, other = (float((made(x) - y).abs().max()) for y in (recorded, exact))
    print(f"{name}: no_grad differs from recorded by {off:.1e}, from the exact GELU's layer by {other:.1e}")
    assert off > 1e-5 if name == "tanh" else off < 1e-9
    assert other > 1e-5 if name == "tanh in a lambda" else other < 1e-9
EOF
