#!/bin/sh
# mlx 0.32.4 on a CPU.
#
# to_fp8 makes 448, the largest number of e4m3, of NaN as of infinity: what has gone wrong before
# looks like a number after a cache of 8 bits. The format has a NaN, which torch and ml_dtypes keep
# and which from_fp8 reads as NaN.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" 'mlx[cpu]==0.32.4' torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import mlx.core as mx
import torch

mx.set_default_device(mx.cpu)
values = [1.0, float("nan"), float("inf"), -float("inf")]
codes = mx.to_fp8(mx.array(values))
torchs = torch.tensor(values).to(torch.float8_e4m3fn)
print("mlx", codes.tolist(), mx.from_fp8(codes, mx.float32).tolist())
print("torch", torchs.view(torch.uint8).tolist(), torchs.float().tolist())
nan = int(torchs.view(torch.uint8)[1])
back = mx.from_fp8(mx.array([nan, nan | 128], dtype=mx.uint8), mx.float32).tolist()
print("mlx reads torch's NaN as", back)
assert mx.from_fp8(codes, mx.float32).tolist() == [1.0, 448.0, 448.0, -448.0] and torchs.float().isnan()[1]
assert all(x != x for x in back)
EOF
