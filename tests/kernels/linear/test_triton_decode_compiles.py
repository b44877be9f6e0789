"""The step kernel compiled for GPUs that need not be there: registers, spills, wide accesses."""

import re
from typing import Any

import pytest

from slipstream.kernels.linear.triton.plan import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")

# 1: for each channel or column
TERMS = {
    "linear_attn": {}, "gated_delta_rule": {"g": 0, "beta": 0}, "rwkv7": {"g": 1, "a": 0, "b": 0},
    "all": {"g": 1, "gv": 0, "beta": 1, "p": 0, "a": 0, "b": 0, "u": 0},
}  # fmt: skip
WIDE = ("g", "gv", "beta", "u", "s_in", "s_out")


def compile_step(kind: str, width: int, capability: int, v_first: bool, pool: bool) -> Any:
    from slipstream.compiler.aot import compile_kernel
    from slipstream.kernels.linear.triton.decode import TILES

    terms, tile = TERMS[kind], TILES[width]
    names = [*"qkvo", "s_in", "s_out", *terms]
    tensors = {f"{x}_ptr": "*fp32" if x in WIDE else "*bf16" for x in names}
    tensors |= {"index_ptr": "*i32", "cu_ptr": "*i32"} if pool else {}
    rows = [f"row_{x}" for x in (*"qkvgpab", "gv", "beta")]
    scalars = dict.fromkeys(("T", "cache_slots", *rows), "i64")
    scalars |= dict.fromkeys(("stride_in", "in_head", "stride_out", "out_head"), "i32:16")
    constants = {
        "K": width, "V": width, "BK": width, "BV": min(tile.BV, width),
        "PER_CHANNEL": terms.get("g") == 1, "PER_COLUMN": terms.get("beta") == 1,
        "IN_V_FIRST": v_first, "OUT_V_FIRST": v_first, "L2_NORM": pool,
    }  # fmt: skip
    return compile_kernel(
        "slipstream.kernels.linear.triton.decode:linear_decode_kernel", tensors, constants,
        scalars, target=f"sm_{capability}", warps=tile.warps,
    )  # fmt: skip


@pytest.mark.parametrize("kind", TERMS)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("width", [16, 128, 256])
@pytest.mark.sample(which=lambda kind, width, capability, v_first: (capability == 90) == v_first)
def test_step_compiles(kind: str, width: int, capability: int, v_first: bool) -> None:
    got = compile_step(kind, width, capability, v_first, pool=kind != "all")
    assert got.stack == 0, f"{got.stack} bytes spilled"
    assert got.registers <= 200
    # the state in accesses of 16 bytes, and never from one layout of threads to another
    numbers = width * min(32, width) // 32  # a lane of one warp
    assert len(re.findall(r"ld\.global\.v4", got.ptx)) >= min(numbers, 32) // 4
    assert not re.search(rf"convert_layout .*tensor<{width}x\d+xf32", got.asm["ttgir"])
