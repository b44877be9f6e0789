"""The kernel that adds up partial sums: compiled for GPUs, and under Triton's interpreter."""

import pytest
import torch

from slipstream.compiler.aot import compile_kernel
from slipstream.runtime.backends import HAVE_TRITON
from tests.support.interpreted import interpreted

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")


@pytest.mark.parametrize("M", [1, 5])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_partial_sums_compile(arch: str, M: int) -> None:
    tensors = {"partial_ptr": "*fp32", **{f"out{i}_ptr": "*bf16" for i in range(M)}}
    kernel = "slipstream.kernels.primitives.device:partial_sums_kernel"
    scalars = {"stride_p": "i32:16", "stride_m": "i32:16"}
    flags = {"M": M, "BP": 512, "BD": 32}
    got = compile_kernel(kernel, tensors, flags, scalars=scalars, target=arch, warps=16)
    assert got.stack == 0


@interpreted
def test_partial_sums_match_torch() -> None:
    from slipstream.kernels.primitives.device import add_partial_sums

    for P, M, D in [(1, 1, 1), (600, 2, 33), (37, 5, 64), (513, 3, 70)]:
        for partial in (torch.randn(P, M, D), torch.randn(M, P, D).transpose(0, 1)):
            outs = [None if i == 1 else torch.empty(D, dtype=torch.bfloat16) for i in range(M)]
            add_partial_sums(partial, outs)
            for i, out in enumerate(outs):
                if out is not None:
                    torch.testing.assert_close(out, partial[:, i].sum(0).bfloat16())
