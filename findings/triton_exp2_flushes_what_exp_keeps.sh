#!/bin/sh
# triton 3.6.0 and 3.9.0 (3.7.1 and 3.8.0 are like them). No GPU: compiled for sm_90.
#
# tl.exp(x) is computed as 2^(x log2 e), so one would expect it to end in tl.exp2's instruction. It
# does not: tl.exp2 becomes ex2.approx.ftz.f32, which flushes subnormal results (below 2^-126) to
# zero, and tl.exp becomes ex2.approx.f32, which keeps them. The usual rewriting of exp(x) as
# exp2(x * log2 e) therefore changes a weak gate's or a softmax's smallest results.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TRITON_CACHE_DIR="$dir/cache"
cat > "$dir/powers.py" <<'EOF'
import re
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def base_2(x_ptr, o_ptr):
    i = tl.arange(0, 128)
    tl.store(o_ptr + i, tl.exp2(tl.load(x_ptr + i)))


@triton.jit
def base_e(x_ptr, o_ptr):
    i = tl.arange(0, 128)
    tl.store(o_ptr + i, tl.exp(tl.load(x_ptr + i)))


def instructions(kernel):
    source = ASTSource(kernel, {"x_ptr": "*fp32", "o_ptr": "*fp32"}, constexprs={})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return set(re.findall(r"ex2\S+", made.asm["ptx"]))


print(triton.__version__, "exp2:", instructions(base_2), " exp:", instructions(base_e))
assert instructions(base_2) == {"ex2.approx.ftz.f32"}
assert instructions(base_e) == {"ex2.approx.f32"}
EOF
for release in 3.6.0 3.9.0; do
    python3 -m pip install -q --no-compile --no-deps --target "$dir/$release" triton==$release
    PYTHONPATH="$dir/$release:$dir/lib" python3 "$dir/powers.py"
done
