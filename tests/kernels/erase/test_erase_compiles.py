"""The kernels of the erased vector compiled for GPUs that need not be there: spills, wide loads."""

import pytest

from slipstream.compiler.aot import compile_kernel
from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
MODULE = "slipstream.kernels.elementwise.triton.erase"


@pytest.mark.parametrize("has_b", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_erase_compiles(backward: bool, has_b: bool) -> None:
    names = ("k", *("b" * has_b), *(("da", "dk", *(("db",) * has_b)) if backward else ("a",)))
    tensors = {f"{name}_ptr": "*bf16" for name in names} | {"g_ptr": "*fp32"}
    if backward:
        tensors["dg_ptr"] = "*fp32"
    got = compile_kernel(
        f"{MODULE}:erase_kernel",
        tensors,
        {"TILE": 2048},
        scalars={"size": "i32:16"},
        warps=4,
        target="sm_90",
    )
    assert got.stack == 0
