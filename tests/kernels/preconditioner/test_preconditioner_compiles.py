"""The preconditioner's kernel compiled for GPUs that need not be there: no spills."""

import pytest

from slipstream.compiler.aot import compile_kernel
from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
MODULE = "slipstream.kernels.elementwise.triton.preconditioner"
FORWARD = {"k": 16, "y": 16, "by": 16} | dict.fromkeys(
    ("g", "beta", "centre", "s_in", "s_out", "sums"), 32
)
BACKWARD = {"k": 16, "dy": 16, "dby": 16, "dk": 16} | dict.fromkeys(
    ("g", "beta", "centre", "s_in", "sums", "ds_out", "dg", "dbeta", "dcentre", "ds_in"), 32
)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["fwd", "bwd"])
def test_preconditioner_compiles(name: str, packed: bool) -> None:
    bits = FORWARD if name == "fwd" else BACKWARD
    tensors = {f"{x}_ptr": "*bf16" if n == 16 else "*fp32" for x, n in bits.items()}
    if packed:
        tensors["cu_ptr"] = "*i64"
    scalars = {"T": "i32", "log_x": "fp32", "eps": "fp32", "centre": "fp32"}
    scalars["H"] = "i32"
    if name == "bwd":
        scalars["tokens"] = "i32"
    got = compile_kernel(
        f"{MODULE}:precondition_kernel",
        tensors,
        {"K": 128, "BT": 64, "BD": 16} | ({"tokens": None} if name == "fwd" else {}),
        scalars=scalars,
        warps=8,
    )
    assert got.stack == 0
