#!/bin/sh
# gguf 0.19.0, numpy 2.3.5.
#
# Eight bits are not always closer than four. Q8_0 scales a block of 32 by its largest number / 127,
# Q4_0 by its largest / 8, and both store the scale as float16, which ends at 6e-8. A block of
# numbers of a few 1e-6 has a scale of 0 in Q8_0 and comes back as zeros; Q4_0 returns it to 12%.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" gguf==0.19.0 numpy==2.3.5
PYTHONPATH="$dir/lib" python3 - <<'EOF'
import numpy as np
from gguf import GGMLQuantizationType, quants


def off(x, kind):
    back = quants.dequantize(quants.quantize(x, kind), kind)
    return float(np.linalg.norm(back - x) / np.linalg.norm(x))


four, eight = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0
block = np.linspace(-3e-6, 3e-6, 32, dtype=np.float32)
usual = 1e4 * block
print("relative error of numbers up to 3e-2: Q8_0", off(usual, eight), " Q4_0", off(usual, four))
print("relative error of numbers up to 3e-6: Q8_0", off(block, eight), " Q4_0", off(block, four))
assert off(usual, eight) < 0.01 < off(usual, four)
assert off(block, eight) == 1.0 and off(block, four) < 0.15
EOF
