#!/bin/sh
# triton 3.6.0 and 3.9.0 (3.7.1 and 3.8.0 are like the first), torch 2.13.0 on a CPU. No GPU.
#
# The interpreter (TRITON_INTERPRET=1) holds bfloat16 as 16-bit integers and computes with them as
# such: 1 + 1 is 1.7e38, -(1) is -4, a sum is the sum of bit patterns. Loads, stores, casts to
# float32 and tl.max are right, float16 is right, and nothing warns. In 3.9.0 argmax, which was right
# up to 3.8.0, takes bit patterns as well, and a negative number is its maximum.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TRITON_CACHE_DIR="$dir/cache"
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy==2.3.5
cat > "$dir/arithmetic.py" <<'EOF'
import sys
import torch, triton
import triton.language as tl


@triton.jit
def arithmetic(x_ptr, o_ptr, OP: tl.constexpr):
    i = tl.arange(0, 4)
    x = tl.load(x_ptr + i)
    if OP == "add":
        tl.store(o_ptr + i, (x + x).to(tl.float32))
    if OP == "minus":
        tl.store(o_ptr + i, (-x).to(tl.float32))
    if OP == "sum":
        tl.store(o_ptr + i, tl.sum(x, 0).to(tl.float32))
    if OP == "max":
        tl.store(o_ptr + i, tl.max(x, 0).to(tl.float32))
    if OP == "argmax":
        tl.store(o_ptr + i, tl.argmax(x, 0).to(tl.float32))


def run(op, dtype):
    o = torch.zeros(4)
    arithmetic[(1,)](torch.tensor([1.0, 2.0, -3.0, 0.5]).to(dtype), o, op)
    return o[0].item()


ops = ("add", "minus", "sum", "max", "argmax")
half, brain = ({op: run(op, dtype) for op in ops} for dtype in (torch.float16, torch.bfloat16))
print(triton.__version__, "float16 ", half)
print(triton.__version__, "bfloat16", brain)
assert half == {"add": 2, "minus": -1, "sum": 0.5, "max": 2, "argmax": 1}
assert brain["add"] > 1e38 and brain["minus"] == -4 and brain["sum"] != 0.5 and brain["max"] == 2
assert brain["argmax"] == int(sys.argv[1])
EOF
for release in 3.6.0 3.9.0; do
    python3 -m pip install -q --no-compile --no-deps --target "$dir/$release" triton==$release
done
export TRITON_INTERPRET=1
PYTHONPATH="$dir/3.6.0:$dir/lib" python3 "$dir/arithmetic.py" 1
PYTHONPATH="$dir/3.9.0:$dir/lib" python3 "$dir/arithmetic.py" 2
