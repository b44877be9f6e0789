#!/bin/sh
# gguf 0.19.0, torchao 0.18.0, mlx 0.32.4 (CPU) and compressed-tensors 0.20.1, torch 2.13.0 (CPU).
#
# All four write the same MXFP4: blocks of 32 numbers that share a power of two, whose largest code is 6. They choose
# that power in three ways. gguf and, by default, torchao cut the exponent of the largest number: all above 6 becomes 6,
# so that 7.9 loses a quarter. compressed-tensors' preset takes the next power for 7 and more, mlx for all above 6
# already, so that it has half as many codes left for the other numbers of a block with 6.5. The largest number of a
# block differs by up to a third between libraries, and what one has written is not what another would have.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install -q --no-compile --target "$dir/lib" gguf==0.19.0 torchao==0.18.0 'mlx[cpu]==0.32.4' \
    compressed-tensors==0.20.1 torch==2.13.0 numpy==2.3.5
PYTHONPATH="$dir/lib" python3 -W ignore - 2> "$dir/warnings" <<'EOP' || { cat "$dir/warnings"; exit 1; }
import mlx.core as mx
import numpy as np
import torch
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams
from gguf import GGMLQuantizationType, quants
from torchao.prototype.mx_formats.mx_tensor import MXTensor

mx.set_default_device(mx.cpu)


def by_gguf(x: np.ndarray) -> np.ndarray:
    return quants.dequantize(quants.quantize(x, GGMLQuantizationType.MXFP4), GGMLQuantizationType.MXFP4)


def by_torchao(x: np.ndarray) -> np.ndarray:
    return MXTensor.to_mx(torch.from_numpy(x), torch.float4_e2m1fn_x2, 32).dequantize(torch.float32).numpy()


def by_mlx(x: np.ndarray) -> np.ndarray:
    form = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    return np.array(mx.dequantize(*mx.quantize(mx.array(x), **form), **form).astype(mx.float32))


def by_compressed_tensors(x: np.ndarray) -> np.ndarray:
    rows, form = torch.from_numpy(x), PRESET_SCHEMES["MXFP4"]["weights"]
    scale, zero = calculate_qparams(rows.amin(1, keepdim=True), rows.amax(1, keepdim=True), form)
    return fake_quantize(rows, scale, zero, form).numpy()


LARGEST = [3.6, 4.0, 6.0, 6.5, 7.0, 7.9]
CUT = ([3, 4, 6, 6, 6, 6], [0.5, 1, 1, 1, 1, 1])
SEEN = {by_gguf: CUT, by_torchao: CUT, by_mlx: ([4, 4, 6, 6, 6, 8], [1, 1, 1, 2, 2, 2]),
        by_compressed_tensors: ([4, 4, 6, 6, 8, 8], [1, 1, 1, 1, 2, 2])}
blocks = np.tile(np.linspace(-1, 1, 32, dtype=np.float32), (len(LARGEST), 1))
blocks[:, 0] = LARGEST
normal = np.random.default_rng(0).standard_normal((4096, 32)).astype(np.float32)
for library, seen in SEEN.items():
    written = library(blocks)
    numbers = written[:, 0].tolist()
    powers = [2 * float(np.abs(row[row != 0]).min()) for row in written]
    error = float(np.sqrt(np.mean((library(normal) - normal) ** 2)))
    print(f"{library.__name__}: {LARGEST} become {numbers}, powers {powers}; normal numbers' error {error:.4f}")
    assert (numbers, powers) == seen
assert np.array_equal(by_gguf(normal), by_torchao(normal))
EOP
