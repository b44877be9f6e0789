"""The kernels of the running mean compiled for GPUs that need not be there: no spills."""

import pytest

from slipstream.compiler.aot import compile_kernel
from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
MODULE = "slipstream.kernels.running_mean.triton"
WEIGHTS = {"k": 16, "o": 16, "r": 32, "s_in": 32, "s_out": 32}
MEANS = {"k": 16, "v": 16, "o": 16} | dict.fromkeys(("w", "u", "s_in", "s_out", "r", "mean"), 32)
WEIGHTS_BACK = {"do": 16, "dk": 16} | dict.fromkeys(("r", "s_in", "dr", "ds_out", "ds_in"), 32)
MEANS_BACK = {"v": 16, "do": 16, "dk": 16, "dv": 16}
MEANS_BACK |= dict.fromkeys(("r", "mean", "w", "u", "ds_out", "dw", "du", "ds_in"), 32)
KERNELS = [
    ("forward:running_mean_fwd_kernel", WEIGHTS),
    ("forward:running_mean_fwd_kernel", MEANS),
    ("backward:running_mean_bwd_kernel", WEIGHTS_BACK),
    ("backward:running_mean_bwd_kernel", MEANS_BACK),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("name", "bits"), KERNELS)
@pytest.mark.parametrize("target", ["sm_90", "sm_80"])
def test_running_mean_compiles(name: str, bits: dict, packed: bool, target: str) -> None:
    tensors = {f"{x}_ptr": "*bf16" if n == 16 else "*fp32" for x, n in bits.items()}
    if packed:
        tensors["cu_ptr"] = "*i64"
    kernel = f"{MODULE}.{name}"
    constants, scalars = {"BT": 64, "BD": 16}, {"T": "i32", "D": "i32:16"}
    got = compile_kernel(kernel, tensors, constants, scalars=scalars, warps=8, target=target)
    assert got.stack == 0
