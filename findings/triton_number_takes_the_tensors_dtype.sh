#!/bin/sh
# triton 3.6.0 and 3.9.0 (3.7.1 and 3.8.0 are like them), torch 2.13.0 on a CPU. No GPU: compiled for sm_90.
#
# A Python number beside a bfloat16 block is rounded to bfloat16 before the operation. 1.003 becomes
# 1, and the compiler then drops the product: x * 1.003 is a copy of x. torch multiplies bfloat16 by
# the number itself and rounds once. Seen for x = 1.9921875: torch 2.0; Triton's code has no product.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TRITON_CACHE_DIR="$dir/cache"
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy==2.3.5
cat > "$dir/scaled.py" <<'EOF'
import torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def scaled(x_ptr, o_ptr):
    i = tl.arange(0, 128)
    tl.store(o_ptr + i, tl.load(x_ptr + i) * 1.003)


def compiled(dtype):
    source = ASTSource(scaled, {"x_ptr": dtype, "o_ptr": dtype}, constexprs={})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm


x = torch.tensor(1.9921875, dtype=torch.bfloat16)
brain, single = ("arith.mulf" in compiled(x)["ttir"] for x in ("*bf16", "*fp32"))
print(triton.__version__, "product in the code: bfloat16", brain, " float32", single)
print("torch:", x.item(), "* 1.003 =", (x * 1.003).item())
assert not brain and single and (x * 1.003).item() == 2.0
EOF
for release in 3.6.0 3.9.0; do
    python3 -m pip install -q --no-compile --no-deps --target "$dir/$release" triton==$release
    PYTHONPATH="$dir/$release:$dir/lib" python3 "$dir/scaled.py"
done
