"""The decay gate's kernels compiled for GPUs that need not be there: spills."""

import pytest

from slipstream.compiler.aot import compile_kernel
from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
MODULE = "slipstream.kernels.elementwise.triton.decay_gate"
PARAMETERS = {"a_ptr": "*bf16", "bias_ptr": "*bf16"}
# channels that all counts are a multiple of, and those of a tile
SIZES = [(1, 32), (16, 512)]


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_decay_gate_compiles(arch: str, size: tuple[int, int], bounded: bool) -> None:
    unit, BC = size
    numbers = dict.fromkeys(("units_b", "units_t", "units_c", "T", "R", "K"), "i32")
    numbers["lower_bound"] = "fp32"
    flags = {"UNIT": unit, "BR": 2048 // BC, "BC": BC, "BOUNDED": bounded}
    forward, backward = {"x_ptr": "*bf16", "g_ptr": "*fp32"}, {"x_ptr": "*bf16", "dx_ptr": "*bf16"}
    backward |= {"dg_ptr": "*fp32", "partial_ptr": "*fp32"}
    for tensors in (forward, backward):
        given = {**tensors, **PARAMETERS, **numbers}
        got = compile_kernel(f"{MODULE}:decay_gate_kernel", given, flags, target=arch, warps=4)
        assert got.stack == 0
        assert ("ld.global.v4" in got.ptx) == (unit == 16)
