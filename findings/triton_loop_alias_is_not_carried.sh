#!/bin/sh
# triton 3.6.0 and 3.9.0 (3.7.1 and 3.8.0 are like them); torch 2.13.0 on a CPU for the interpreter. No GPU.
#
# Two names of one value before a loop (`i = t`) of which the loop sets one to the other before that
# changes (`i = t; t += 1`): compiled code reads `i` from before the loop in every turn. The loop
# carries `t` and the sum, and not `i`. There is no error, and the interpreter carries it as Python
# does. From t = 5, four turns add 5 + 5 + 6 + 7 = 23 interpreted; the IR adds 5 four times.
# Where `i` begins as a value of its own, it is carried.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export TRITON_CACHE_DIR="$dir/cache"
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy==2.3.5
cat > "$dir/kernels.py" <<'EOF'
import triton
import triton.language as tl


@triton.jit
def alias(x_ptr, o_ptr, n):
    t = tl.load(x_ptr)
    i = t
    total = 0
    for _ in range(n):
        total += i
        i = t
        t += 1
    tl.store(o_ptr, total)
EOF
cat > "$dir/compiled.py" <<'EOF'
import re
import triton
from kernels import alias
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

source = ASTSource(alias, {"x_ptr": "*i32", "o_ptr": "*i32", "n": "i32"}, constexprs={})
text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ttir"]
(carried,) = re.findall(r"iter_args\((.*?)\)", text)
(added,) = re.findall(r"%total\w* = arith.addi %total\w*, (%\w+)", text)
(loaded,) = re.findall(r"(%\w+) = tt.load", text)
print(triton.__version__, "compiled: the loop carries", carried, "and adds", added, "the load", loaded)
assert carried.count("=") == 2 and added == loaded
EOF
cat > "$dir/interpreted.py" <<'EOF'
import torch, triton
from kernels import alias

o = torch.zeros(1, dtype=torch.int32)
alias[(1,)](torch.tensor([5], dtype=torch.int32), o, 4)
print(triton.__version__, "interpreted:", o.item())
assert o.item() == 23
EOF
for release in 3.6.0 3.9.0; do
    python3 -m pip install -q --no-compile --no-deps --target "$dir/$release" triton==$release
    PYTHONPATH="$dir/$release:$dir/lib" python3 "$dir/compiled.py"
    TRITON_INTERPRET=1 PYTHONPATH="$dir/$release:$dir/lib" python3 "$dir/interpreted.py"
done
