#!/bin/sh
# torch 2.13.0 on a CPU.
#
# grouped_mm multiplies the rows of each expert by the expert's weight; offs says where each one ends,
# and what lies past the last end is said to be ignored, which a buffer of fixed capacity relies on.
# The rows past it are left as memory was, in the result and in the gradient of the first operand,
# too: what came before hands it on to its own weights. (Shown by having fresh memory filled with NaN.)
# The weight of an expert without rows gets zeros.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import torch

torch.use_deterministic_algorithms(True)  # fills what torch.empty gives
rows = torch.randn(64, 32).bfloat16().requires_grad_()
weights = torch.randn(4, 32, 16).bfloat16().requires_grad_()
ends = torch.tensor([16, 16, 32, 48], dtype=torch.int32)
out = torch.nn.functional.grouped_mm(rows, weights, offs=ends)
out[:48].float().sum().backward()
found = {
    "result": out[48:],
    "gradient of rows": rows.grad[48:],
}
print({name: f"{x.isnan().float().mean():.0%} NaN" for name, x in found.items()})
print("expert without rows", weights.grad[1].abs().max().item())
assert all(x.isnan().all() for x in found.values()) and not weights.grad[1].any()
assert out[:48].isfinite().all() and rows.grad[:48].isfinite().all()
EOF
