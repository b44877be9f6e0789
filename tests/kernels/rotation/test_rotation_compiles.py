"""The rotation's kernel compiled for GPUs that need not be there."""

import pytest

from slipstream.compiler.aot import compile_kernel
from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
MODULE = "slipstream.kernels.elementwise.triton.rotation"
FORWARD = {"q": 16, "k": 16, "q_out": 16, "k_out": 16, "theta": 32, "dots": 32}
BACKWARD = dict.fromkeys(("q", "k", "dq_out", "dk_out", "dq", "dk"), 16) | dict.fromkeys(
    ("theta", "ddots", "dtheta"), 32
)


@pytest.mark.parametrize(("R", "K"), [(1, 128), (4, 64)])
@pytest.mark.parametrize("name", ["fwd", "bwd"])
def test_rotation_compiles(name: str, R: int, K: int) -> None:
    bits = FORWARD if name == "fwd" else BACKWARD
    tensors = {f"{x}_ptr": "*bf16" if n == 16 else "*fp32" for x, n in bits.items()}
    constants = {"R": R, "K": K, "P": K // 2, "ROWS": 16, "PAIRS": K // 2}
    got = compile_kernel(
        f"{MODULE}:rotation_kernel", tensors, constants, scalars={"rows": "i32"}, warps=4
    )
    # sine and cosine of large angles need 28 bytes of it
    assert got.stack <= 64
    assert got.registers <= 128
