"""Decoding from keys of 8 bits compiled for GPUs that need not be there, and what attention's
kernels are not compiled for. The calls themselves are traced, so tiles and arguments are those of a
real launch."""

from functools import partial
from typing import Any

import pytest
import torch

from slipstream import ops
from slipstream.compiler.arch import ARCHS
from slipstream.compiler.trace import trace
from slipstream.kernels.attention.cache import Cache
from slipstream.kernels.attention.inputs import AttentionOptions
from tests.support import wants

pytestmark = wants.compiler


def rounded_call(D: int, dtype: torch.dtype, page: int) -> Any:
    def call(device: torch.device) -> None:
        from slipstream.kernels.attention.triton import decode_launch

        def make(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        table = make(2, 40, dtype=torch.int32) if page else None
        shape = (90, page, 2) if page else (2, 3000, 2)
        k, scale = make(*shape, D), make(*shape, dtype=torch.float32)
        q, lengths = make(2, 1, 8, D, dtype=torch.bfloat16), make(2, dtype=torch.int32)
        cache = Cache(q, k, k, lengths, table=table, k_scale=scale, v_scale=scale)
        decode_launch.decode(cache, AttentionOptions(0.1, -1, 0))

    return call


@pytest.mark.parametrize(
    ("arch", "D", "page"), [("sm_90", 64, 0), ("sm_90", 128, 128), ("sm_80", 128, 30)]
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_decoding_from_8_bits_compiles(arch: str, D: int, page: int, dtype: torch.dtype) -> None:
    """By few instructions a key: most of what was once converted by the compiler (decode.py)."""
    job, *_ = trace(rounded_call(D, dtype, page), arch, backward=False)
    got = job.compile()
    assert job.name == "softmax_decode_kernel"
    assert got.shared <= ARCHS[arch].shared and got.stack == 0
    assert got.instructions["mma.sync"] and not got.instructions["wgmma"]
    assert "cvt.rn.bf16" not in got.ptx  # nothing is converted by way of float32


@pytest.mark.parametrize(
    ("arch", "D", "page"),
    [("sm_80", 16, 0), ("sm_120", 32, 0), ("gfx942", 64, 0), ("gfx942", 62, 30)],
)
def test_decoding_of_other_shapes_compiles(arch: str, D: int, page: int) -> None:
    """From narrow heads a product takes a quarter of the channels, and at least 16; AMD's compiler
    reshapes no pointers."""
    job, *_ = trace(rounded_call(D, torch.int8, page), arch, backward=False)
    got = job.compile()
    assert job.name == "softmax_decode_kernel"
    assert got.shared <= ARCHS[arch].shared and got.stack <= 256
    assert arch == "gfx942" or got.instructions["mma.sync"]


def _attention(device: torch.device, D: int, dropout_p: float) -> torch.Tensor:
    q, k, v = (torch.empty(2, 200, 4, D, device=device, dtype=torch.bfloat16) for _ in range(3))
    return ops.attention(q, k, v, dropout_p=dropout_p)


def test_probability_is_nothing_that_kernels_are_compiled_for() -> None:
    keys = [
        {job.key for job in trace(partial(_attention, D=64, dropout_p=p), "sm_80")}
        for p in (0.1, 0.5, 0.9)
    ]
    assert keys[0] == keys[1] == keys[2]
