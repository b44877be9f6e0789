#!/bin/sh
# nystrom-attention 0.0.14, torch 2.13.0 (CPU).
#
# A row of a batch gets other outputs beside other rows, without dropout and in evaluation. The layer inverts a small
# matrix of each row and head by a fixed number of iterations, which begin at the transpose divided by the largest sums
# of columns and rows in the whole batch, so that a row with larger sums changes how far the others get. With twelve
# iterations in place of six, the default, the difference is larger. A batch of two equal rows gives what one alone
# gives.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" nystrom-attention==0.0.14 torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 -W ignore - <<'EOP'
import torch
from nystrom_attention import NystromAttention

for iterations in (6, 12):
    torch.manual_seed(0)
    layer = NystromAttention(dim=32, dim_head=16, heads=2, num_landmarks=8, pinv_iterations=iterations).double().eval()
    x, other = torch.randn(2, 1, 64, 32, dtype=torch.float64)
    with torch.no_grad():
        alone = layer(x)
        for name, row, low, high in (("itself", x, 0.0, 1e-9), ("one ten times larger", 10 * other, 5e-3, 1.0)):
            moved = float((layer(torch.cat([x, row]))[:1] - alone).abs().max())
            top = float(alone.abs().max())
            print(f"{iterations} iterations, beside {name}: outputs up to {top:.2f} move by {moved:.1e}")
            assert low <= moved <= high
EOP
