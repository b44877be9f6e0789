"""What operators launch of calls of many sizes: kernels, grids, tiles, warps, stages and sizes.

Much of it is chosen for speed alone: no number tells. A digest of the launches of some operators is
here: whoever changes a choice on purpose measures it, and writes the new digest; who only gives a
kernel other arguments writes it too.
"""

from itertools import chain, product
from typing import Any
from unittest import mock
from zlib import crc32

import pytest
import torch

from slipstream.tools.backend_query import trace_operator
from slipstream.tools.catalog import SAMPLES, Shape
from slipstream.tools.samples import Sample
from tests.support import wants
from tests.support.scripts import script

pytestmark = wants.compiler

COMPILERS = {"triton": "3.6.0", "ptxas": "13.0.88"}
FP32 = torch.float32
# heads, their width, a layer's width, classes
WIDTHS = (2, 64, 128, 1000), (8, 128, 1024, 1 << 15), (16, 256, 4096, 70000), (64, 128, 8192, 50)
CALLS = (1, 1), (2, 16), (1, 64), (64, 1), (1, 1024), (2, 4096), (1, 1 << 16)
SHAPES = [
    Shape(B, T, H, K, K, D=H * K, C=C, Z=Z, state=True, M=min(T, 512))
    for (H, K, C, Z), (B, T) in product(WIDTHS, CALLS)
] + [
    Shape(B, T, 4, 64, 64, D=256, C=512, state=True, packed=packed, dtype=FP32)
    for B, T, packed in ((2, 1, False), (3, 200, True), (200, 10, True))
]
# whose tiles are others, and a row and packed sequences in float32
OTHERS, OF_OTHERS = ("sm_75", "sm_86", "sm_100", "gfx942"), [SHAPES[4], SHAPES[-2]]


def described(x: Any) -> Any:
    if isinstance(x, tuple | list):
        return [*map(described, x)]
    if hasattr(x, "block_shape"):
        return x.shape, x.strides, x.block_shape
    plain = x is None or isinstance(x, bool | int | float | str)
    return x if plain else str(getattr(x, "dtype", type(x).__name__))


def launches(op: str, samples: list[Sample] = SAMPLES) -> list[str]:
    """Of each launch the kernel, its grid, options and arguments; of tensors the dtypes."""
    from triton import JITFunction

    found: list[str] = []
    run = JITFunction.run

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        values = [*map(described, (*args, *named.values()))]
        if kernel.__name__ != "scan_ids_kernel":  # has a number that the process gave a name
            found.append(f"{kernel.__name__}{grid} {values}")
        return run(kernel, *args, grid=grid, warmup=warmup, **named)

    with mock.patch.object(JITFunction, "run", note):
        # tests/kernels/linear/test_choices.py has what the linear family chooses at more shapes
        every = (3 if op.startswith("chunk_") else 1) if samples is SAMPLES else 6
        shapes = {"sm_90": SHAPES[::every], "sm_80": SHAPES[:: 3 * every]}
        for arch, some in (shapes | dict.fromkeys(OTHERS, OF_OTHERS)).items():
            for sample, shape in product([x for x in samples if x.op == op], some):
                trace_operator(sample, shape, arch, compilers=COMPILERS, impls=(None,))
    return [*dict.fromkeys(found)]


DIGESTS = {
    "attention flash_attn_with_kvcache latent_attention": 569962710,
    "attnres rotary_embedding": 3769369005,
    "mhc_pre mhc_post": 3451431210,
    "index": 3342301806,
    "rms_norm rms_norm_gated layer_norm group_norm l2_norm": 2998257323,
    "short_convolution short_convolution_update": 1521534201,
    "mixer_step recurrent_step rwkv7_step token_mix_step": 1069302843,
    "projection_step matmul embedding": 207899880,
    "selective_scan token_shift": 3769702956,
    "swiglu geglu sigmoid_glu squared_relu glu_linear": 2627509073,
    "cross_entropy linear_cross_entropy linear_log_probs linear_kl_div": 2105608807,
    "chunk_linear_attn chunk_simple_gla chunk_retention chunk_lightning_attn": 1310965690,
    "chunk_gla chunk_rwkv6 chunk_gsa": 4114583106,
    "chunk_hgrn chunk_rwkv4 chunk_mamba3": 1814822592,
    "chunk_delta_rule chunk_gated_delta_rule chunk_comba chunk_gated_delta_product": 2864352035,
    "chunk_kda": 2501612795,
    "chunk_gdn2 chunk_dplr_delta_rule chunk_rwkv7": 2889172526,
}


@pytest.mark.parametrize("names", DIGESTS)
def test_launches_by_sizes(names: str) -> None:
    found = chain.from_iterable(map(launches, names.split()))
    assert crc32("".join(found).encode()) == DIGESTS[names]


def test_launches_of_layers_by_sizes() -> None:
    """Of what layers and engines ask operators for beside."""
    samples = script("tools/layer_samples").LAYER_SAMPLES
    found = chain.from_iterable(launches(x, samples) for x in sorted({x.op for x in samples}))
    assert crc32("".join(found).encode()) == 991977567


def test_every_operator_has_a_digest() -> None:
    by_token = {x.op for x in SAMPLES if x.op.startswith("fused_recurrent_")}  # launch as chunks do
    assert sorted(" ".join(DIGESTS).split()) == sorted({x.op for x in SAMPLES} - by_token)
