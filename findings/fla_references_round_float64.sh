#!/bin/sh
# fla-core 0.6.0, torch 2.13.0 on a CPU, triton 3.6.0. No GPU.
#
# fla's references in plain torch (ops/*/naive.py) compute in float32 whatever they are given. Of
# float64 inputs the results have the very bits of the float32 call, and those of KDA and simple GLA
# (recurrent) are returned as float64. Whoever takes them in float64 for the exact result of a kernel
# measures against float32 rounding.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 triton==3.6.0 fla-core==0.6.0 numpy
PYTHONPATH="$dir/lib" python3 - <<'EOF' 2> "$dir/log" || { cat "$dir/log"; exit 1; }
import torch
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.kda.naive import naive_recurrent_kda
from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

torch.manual_seed(0)
q, k, v = (torch.randn(1, 40, 2, 8) for _ in "qkv")
k = torch.nn.functional.normalize(k, dim=-1)
g, beta = -torch.rand(1, 40, 2), torch.rand(1, 40, 2)
calls = {
    naive_recurrent_kda: (q, k, v, -torch.rand(1, 40, 2, 8), beta),
    naive_recurrent_gated_delta_rule: (q, k, v, beta, g),
    naive_recurrent_simple_gla: (q, k, v, g),
}
dtypes = []
for function, inputs in calls.items():
    narrow, wide = function(*inputs)[0], function(*(x.double() for x in inputs))[0]
    dtypes.append(wide.dtype)
    print(function.__name__, wide.dtype, "differs from float32's by", (wide - narrow).abs().max().item())
    assert torch.equal(wide, narrow.to(wide.dtype))
assert dtypes == [torch.float64, torch.float32, torch.float64]
EOF
