#!/bin/sh
# triton 3.6.0, torch 2.13.0 on a CPU, numpy 2.3.5 and 2.4.6. No GPU.
#
# `for _ in range(n)`, with n an argument of the kernel, is the usual loop of a Triton kernel. Under
# TRITON_INTERPRET=1 it is a TypeError from numpy 2.4 on: the interpreter holds n as an array of one
# element and calls int() of it, which numpy had deprecated and then took away. Loops to a constexpr
# run. pip takes the newer numpy beside that Triton, since neither excludes the other.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TRITON_CACHE_DIR="$dir/cache"
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy==2.3.5
python3 -m pip install -q --no-compile --no-deps --target "$dir/triton" triton==3.6.0
python3 -m pip install -q --no-compile --no-deps --target "$dir/numpy" numpy==2.4.6
cat > "$dir/loops.py" <<'EOF'
import sys
import warnings
import numpy, torch, triton
import triton.language as tl

warnings.simplefilter("ignore")


@triton.jit
def loop(o_ptr, n, N: tl.constexpr):
    total = 0
    for _ in range(n if N == 0 else N):
        total += 2
    tl.store(o_ptr, total)


o = torch.zeros(1, dtype=torch.int32)
loop[(1,)](o, 4, 4)
assert o.item() == 8
try:
    loop[(1,)](o, 5, 0)
    said = f"gives {o.item()}"
except Exception as error:
    said = str(error)
print("numpy", numpy.__version__, "range(n)", said)
assert said == "gives 10" if sys.argv[1] == "runs" else "0-dimensional" in said
EOF
export TRITON_INTERPRET=1
PYTHONPATH="$dir/triton:$dir/lib" python3 "$dir/loops.py" runs
PYTHONPATH="$dir/numpy:$dir/triton:$dir/lib" python3 "$dir/loops.py" raises
