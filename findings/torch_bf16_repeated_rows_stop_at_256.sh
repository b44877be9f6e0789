#!/bin/sh
# torch 2.13.0 on a CPU.
#
# The gradient of an embedding in bfloat16, of x[index], and index_add add the rows that share an
# index in bfloat16: a token that a batch has 1000 times gets a gradient of 256, where 1 is half a
# unit of the last place and is rounded away (float16 ends at 2048). sum, cumsum, scatter_add and the
# gradients of expand and repeat_interleave add the same numbers in float32 and give 1000.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import torch

ones, zero = torch.ones(1000, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
same = torch.zeros(1000, dtype=torch.long)


def gradient(function):
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    return torch.autograd.grad(function(x).sum(), x)[0].item()


narrow = {
    "embedding's gradient": gradient(lambda x: torch.nn.functional.embedding(same, x)),
    "x[index]'s gradient": gradient(lambda x: x[same]),
    "index_add": zero.index_add(0, same, ones).item(),
    "index_put(accumulate)": zero.index_put((same,), ones, accumulate=True).item(),
}
wide = {
    "scatter_add": zero.scatter_add(0, same, ones).item(),
    "expand's gradient": gradient(lambda x: x.expand(1000, 1)),
    "repeat_interleave's gradient": gradient(lambda x: x.repeat_interleave(1000, 0)),
    "cumsum": ones.cumsum(0)[-1].item(),
}
print(narrow, wide, sep="\n")
assert set(narrow.values()) == {256.0} and set(wide.values()) == {1000.0}
EOF
