#!/bin/sh
# triton 3.6.0 and 3.9.0, torch 2.13.0 on a CPU, by the interpreter (TRITON_INTERPRET=1). No GPU.
#
# tl.sort of a block that has one NaN returns no NaN: it is lost, and another element is there twice.
# Neither end of the result shows it. torch.sort puts NaN last and keeps all elements.
# Seen: [3, nan, 1, 2, 7, -1, 0, 5] becomes [-1, 0, 1, 2, 3, 3, 5, 7].
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TRITON_CACHE_DIR="$dir/cache"
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy==2.3.5
cat > "$dir/order.py" <<'EOF'
import torch, triton
import triton.language as tl


@triton.jit
def order(x_ptr, o_ptr):
    i = tl.arange(0, 8)
    tl.store(o_ptr + i, tl.sort(tl.load(x_ptr + i)))


x, o = torch.tensor([3, float("nan"), 1, 2, 7, -1, 0, 5]), torch.zeros(8)
order[(1,)](x, o)
print(triton.__version__, "Triton", o.tolist(), "torch", x.sort().values.tolist())
assert o.tolist() == [-1, 0, 1, 2, 3, 3, 5, 7]
assert x.sort().values.isnan().tolist() == [False] * 7 + [True]
EOF
for release in 3.6.0 3.9.0; do
    python3 -m pip install -q --no-compile --no-deps --target "$dir/$release" triton==$release
    TRITON_INTERPRET=1 PYTHONPATH="$dir/$release:$dir/lib" python3 "$dir/order.py"
done
