#!/bin/sh
# mlx 0.32.4 (its CPU back end), gguf 0.19.0 beside it.
#
# Quantizing weights that were dequantized is no identity in mlx's affine mode, at the same bits and group size. The
# range of a group is stretched so that 0 has a code, and the codes at its end may stay empty; the second time the range
# is that of the numbers that are left, and the step is another one. At 4 bits one weight of nine moves, by up to two
# thirds of a step, and the error against the original grows by 6%. From the third time on nothing moves. So a
# checkpoint that was dequantized for conversion and quantized again is not the one before. At 2 bits, in mxfp4, mxfp8
# and nvfp4, and in GGUF's Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 it is.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" 'mlx[cpu]==0.32.4' gguf==0.19.0 numpy==2.3.5
PYTHONPATH="$dir/lib" python3 - <<'EOP'
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, quants

mx.set_default_device(mx.cpu)
weights = np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32)


def through_mlx(x: np.ndarray, **form) -> np.ndarray:
    back = mx.dequantize(*mx.quantize(mx.array(x), **form), **form)
    return np.array(back.astype(mx.float32))


def error(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean((x - weights) ** 2)))


MOVES = {3: True, 4: True, 6: True, 8: True, 2: False}
for bits, moves in MOVES.items():
    form = {"group_size": 64, "bits": bits}
    first = through_mlx(weights, **form)
    second = through_mlx(first, **form)
    third = through_mlx(second, **form)
    step = np.repeat(np.abs(np.array(mx.quantize(mx.array(weights), **form)[1])), 64, 1)
    by = np.abs(second - first) / step
    print(f"affine, {bits} bits: {float((by > 0.1).mean()):.1%} of the weights move, by up to {float(by.max()):.2f} "
          f"steps; error {error(first):.4f}, then {error(second):.4f}")
    assert (float((by > 0.1).mean()) > 0.02 and error(second) > 1.01 * error(first)) == moves
    assert moves or np.array_equal(first, second)
    assert float((np.abs(third - second) / step).max()) < 0.1
for mode, group, bits in (("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)):
    form = {"group_size": group, "bits": bits, "mode": mode}
    first = through_mlx(weights, **form)
    assert np.array_equal(first, through_mlx(first, **form))
for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
    kind = GGMLQuantizationType[name]
    first = quants.dequantize(quants.quantize(weights, kind), kind)
    assert np.array_equal(first, quants.dequantize(quants.quantize(first, kind), kind))
print("mxfp4, mxfp8, nvfp4 and GGUF's types: nothing moves")
EOP
