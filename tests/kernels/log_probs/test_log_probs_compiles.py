"""The kernel of log-probabilities and entropies compiled for GPUs that need not be there."""

import pytest

from slipstream.compiler.aot import compile_kernel
from slipstream.kernels.primitives import logit_chunks
from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")


@pytest.mark.parametrize("V", [700, 50257, 131072])
@pytest.mark.parametrize("backward", [False, True])
def test_log_probs_compile(V: int, backward: bool) -> None:
    names = "log_prob", "entropy", *(("dlog_prob", "dentropy") if backward else ())
    tensors = {f"{name}_ptr": "*fp32" for name in names}
    tensors |= {"logits_ptr": "*bf16", "target_ptr": "*i64"}
    if backward:
        tensors["grad_ptr"] = "*bf16"
    BV, warps = next((BV, warps) for most, BV, warps in logit_chunks.TILES if most >= V)
    got = compile_kernel(
        "slipstream.kernels.elementwise.triton.log_probs:log_probs_kernel",
        tensors,
        {"V": V, "BV": BV, "INNER": 8, "STAGES": logit_chunks.STAGES},
        scalars={"stride": "i32", "grad_stride": "i32", "ignore_index": "i32", "scale": "fp32"},
        warps=warps,
        target="sm_90",
    )
    assert got.stack == 0
