#!/bin/sh
# torch 2.13.0 (2.11.0 alike) on a CPU.
#
# torch.compile(fullgraph=True) traces max and min of sizes, but with default= or key= only while all
# they see are constants in a list: the function that compiles for fixed sizes raises Unsupported
# once a size is symbolic, and a generator raises even where it yields nothing that is dynamic. Without
# the keywords the same generators and symbolic sizes compile.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 - 2>/dev/null <<'EOF'
import torch


def compiles(function, dynamic):
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="eager")
    try:
        return torch.equal(compiled(torch.ones(5)), function(torch.ones(5)))
    except torch._dynamo.exc.Unsupported:
        return False


functions = {
    "generator": lambda x: x + max(n for n in (x.shape[0], 3)),
    "list, default": lambda x: x + max([x.shape[0], 3], default=0),
    "list, key": lambda x: x + min([x.shape[0], 3], key=lambda n: -n),
    "generator, default": lambda x: x + max((n for n in (7, 3)), default=0),
}
seen = {name: [compiles(f, dynamic) for dynamic in (False, True)] for name, f in functions.items()}
for name, found in seen.items():
    print(f"{name:20} fixed sizes {found[0]!s:6} symbolic sizes {found[1]}")
assert seen["generator"] == [True, True]
assert seen["list, default"] == [True, False]
assert seen["list, key"][1] is False
assert seen["generator, default"] == [False, False]
EOF
