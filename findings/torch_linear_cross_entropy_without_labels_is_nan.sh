#!/bin/sh
# torch 2.13.0 on a CPU.
#
# A batch whose labels are all ignored, as packed rows of prompts alone have: cross_entropy's mean is
# NaN, but its gradients are zeros, so training goes on. linear_cross_entropy without options does the
# same. With options, which are said to change memory alone, the gradients of input and weight are
# NaN: one such batch ends a run. (With reduction="sum" both give 0 and zeros.)
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import torch
from torch.nn import LinearCrossEntropyOptions as Options
from torch.nn.functional import cross_entropy, linear, linear_cross_entropy

labels = torch.full((6,), -100)


def gradients(function, **options):
    torch.manual_seed(0)
    x, weight = torch.randn(6, 8).requires_grad_(), torch.randn(32, 8).requires_grad_()
    function(x, weight, labels, **options).backward()
    return [float(t.grad.abs().max()) for t in (x, weight)]


two = gradients(lambda x, weight, labels: cross_entropy(linear(x, weight), labels))
one = gradients(linear_cross_entropy)
chunks = gradients(linear_cross_entropy, options=Options())
total = gradients(linear_cross_entropy, options=Options(), reduction="sum")
print("linear and cross_entropy", two, "one call", one, "in chunks", chunks, "their sum", total)
assert two == one == total == [0.0, 0.0] and all(x != x for x in chunks)
EOF
