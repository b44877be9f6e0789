#!/bin/sh
# mlx 0.32.4 (its CPU back end).
#
# mx.softmax of bfloat16 or float16 divides by a sum in the dtype of the numbers, where adding 1 stops at 256 and at
# 2048. So the probabilities of 4096 equal logits add up to 16 and 2, and attention written with it is as much too large
# over long rows. precise=True gives 1. The sum, the mean and logsumexp of bfloat16 do not stop, so they are no sign of
# it.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" 'mlx[cpu]==0.32.4'
PYTHONPATH="$dir/lib" python3 - <<'EOP'
import math

import mlx.core as mx

mx.set_default_device(mx.cpu)
SEEN = {(mx.bfloat16, 256): 1.0, (mx.bfloat16, 1024): 4.0, (mx.bfloat16, 4096): 16.0, (mx.float16, 256): 1.0,
        (mx.float16, 1024): 1.0, (mx.float16, 4096): 2.0}


def total(x: mx.array, precise: bool) -> float:
    return float(mx.softmax(x, axis=-1, precise=precise).astype(mx.float32).sum())


for (dtype, width), seen in SEEN.items():
    logits = mx.zeros((1, width), dtype=dtype)
    sums = total(logits, False), total(logits, True)
    print(f"{dtype}, {width} equal logits: probabilities add up to {sums[0]:.3f}, with precise=True to {sums[1]:.3f}")
    assert abs(sums[0] - seen) < 1e-2 and abs(sums[1] - 1) < 1e-2
mx.random.seed(0)
logits = mx.random.normal((1, 4096)).astype(mx.bfloat16)
print(f"4096 normal logits in bfloat16: {total(logits, False):.2f} and {total(logits, True):.2f}")
assert total(logits, False) > 2 and abs(total(logits, True) - 1) < 1e-2
ones, zeros = mx.ones((4096,), dtype=mx.bfloat16), mx.zeros((4096,), dtype=mx.bfloat16)
assert float(ones.sum()) == 4096 and float(ones.mean()) == 1
assert abs(float(mx.logsumexp(zeros)) - math.log(4096)) < 0.04
EOP
