#!/bin/sh
# torch 2.13.0 on a CPU.
#
# torch.nn.functional.linear_cross_entropy is new in 2.13; with options it works in chunks of rows and
# is said to compute what linear and cross_entropy compute. The mean adds up the chunks' shares in the
# inputs' dtype: in bfloat16 the shares of many chunks fall below half a unit of the last place, and
# the loss stops growing at 2, 4 or 8. The more the vocabulary exceeds the width, the more chunks the
# default takes: 8192 tokens, 16 channels, 8192 classes give 4.0 for 9.5, and the gradient of the
# weight is 9% off. A batch of fixed chunks of 64 rows gives 1.0 for 4.6. acc_policy="accurate" and
# acc_dtype=torch.float32 change neither loss. Without options loss and gradient are right.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" torch==2.13.0 numpy
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import torch
from torch.nn import LinearCrossEntropyOptions as Options
from torch.nn.functional import linear_cross_entropy


def both(tokens, width, classes, dtype, options):
    torch.manual_seed(0)
    x = torch.randn(tokens, width).to(dtype)
    weight = (torch.randn(classes, width) / width**0.5).to(dtype).requires_grad_()
    labels = torch.randint(classes, (tokens,))
    loss = linear_cross_entropy(x, weight, labels, options=options)
    loss.backward()
    return loss.item(), weight.grad.float()


def off(found, right):
    return ((found - right).norm() / right.norm()).item()


for shape, options, loss_seen in (
    ((8192, 16, 8192), Options(), 4.0),
    ((65536, 16, 64), Options(batch_chunk_size=64), 1.0),
    ((65536, 16, 64), Options(batch_chunk_size=64, acc_policy="accurate", acc_dtype=torch.float32), 1.0),
):
    right, gradient = both(*shape, torch.float32, None)
    plain, plain_gradient = both(*shape, torch.bfloat16, None)
    loss, found = both(*shape, torch.bfloat16, options)
    print(shape, "float32", round(right, 2), "bf16", plain, "in chunks", loss, "gradient off by", round(off(found, gradient), 3))
    assert loss == loss_seen and off(found, gradient) > 0.05
    assert abs(plain - right) < 0.1 and off(plain_gradient, gradient) < 0.01
EOF
