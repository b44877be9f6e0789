#!/bin/sh
# torch 2.13.0 on a CPU, ml_dtypes 0.6.0.
#
# What is too large for an 8-bit float: torch makes 448, the largest number, of it in float8_e4m3fn,
# of infinity, too. In float8_e4m3fnuz, AMD's, the same values are NaN, and in float8_e5m2 infinite.
# ml_dtypes, which jax and numpy use, makes NaN of them in e4m3fn. So a test for NaN finds a scale that
# is too small with one format and library, and not with the other. fill_ with such a number raises.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 ml_dtypes==0.6.0 numpy
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import ml_dtypes
import numpy as np
import torch

values = [448.0, 464.0, 480.0, 1e9, float("inf")]
found = {
    str(dtype).split("_", 1)[1]: torch.tensor(values).to(dtype).float().tolist()
    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
}
found["e4m3fn of ml_dtypes"] = np.array(values, np.float32).astype(ml_dtypes.float8_e4m3fn).astype(float).tolist()
for name, x in found.items():
    print(name, x)
assert found["e4m3fn"] == [448.0] * 5
assert np.isnan(found["e4m3fnuz"]).all() and found["e5m2"][3:] == [float("inf")] * 2
assert found["e4m3fn of ml_dtypes"][:2] == [448.0] * 2 and np.isnan(found["e4m3fn of ml_dtypes"][2:]).all()
try:
    torch.empty(2, dtype=torch.float8_e4m3fn).fill_(480.0)
    raise SystemExit("no error")
except RuntimeError as e:
    print(e)
EOF
