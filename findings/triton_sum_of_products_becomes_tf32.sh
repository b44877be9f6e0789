#!/bin/sh
# triton 3.7.1 and 3.8.0 (3.6.0 is like the first, 3.9.0 like the second). No GPU: compiled for sm_90.
#
# tl.sum(x[:, :, None] * y[None, :, :], 1) of float32 blocks is recognised as a matrix product. Up to
# 3.7.1 that product is tf32: factors keep 10 bits of mantissa, in a kernel that has no tl.dot and
# asks for no precision. From 3.8.0 on it stays float32, without tensor cores.
# Seen in PTX: 3.7.1 mma.sync ... .f32.tf32.tf32.f32; 3.8.0 fma.rn.f32 alone.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TRITON_CACHE_DIR="$dir/cache"
cat > "$dir/sums.py" <<'EOF'
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def sums(x_ptr, y_ptr, o_ptr, N: tl.constexpr):
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x, y = tl.load(x_ptr + o), tl.load(y_ptr + o)
    tl.store(o_ptr + o, tl.sum(x[:, :, None] * y[None, :, :], 1))


types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "o_ptr": "*fp32", "N": "constexpr"}
source = ASTSource(sums, types, constexprs={(3,): 32})
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
found = "mma.sync" in ptx and ".tf32.tf32" in ptx
print(triton.__version__, "tf32 tensor cores:", found, " fma.rn.f32:", ptx.count("fma.rn.f32"))
assert found == (sys.argv[1] == "tf32")
EOF
for release in 3.7.1 3.8.0; do
    python3 -m pip install -q --no-compile --no-deps --target "$dir/$release" triton==$release
done
PYTHONPATH="$dir/3.7.1:$dir/lib" python3 "$dir/sums.py" tf32
PYTHONPATH="$dir/3.8.0:$dir/lib" python3 "$dir/sums.py" float32
