"""A gated MLP's products compiled for sm_90 without one: instructions, spills, shared memory."""

import pytest

from slipstream.compiler import arch as arches
from slipstream.compiler.aot import compile_kernel
from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
MODULE = "slipstream.kernels.elementwise.sm90.glu"


@pytest.mark.parametrize(("f", "dtype"), [("silu", "bf16"), ("gelu", "fp16")])
def test_glu_products_compile(f: str, dtype: str) -> None:
    from slipstream.kernels.elementwise.sm90 import glu as launch
    from slipstream.kernels.primitives.gluon_compat import gl

    types = {"bf16": gl.bfloat16, "fp16": gl.float16}

    def descriptor(*block: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), types[dtype])
        return f"tensordesc<{dtype}{list(block)},{layout!r}>"

    BK = launch.BK
    tensors = {"x_desc": descriptor(64, BK)}
    tensors |= {f"{name}_w_desc": descriptor(128, BK) for name in ("gate", "up")}
    tensors |= {f"{name}_desc": descriptor(64, 64) for name in ("gate", "up", "h")}
    got = compile_kernel(
        f"{MODULE}:glu_products_sm90_kernel",
        tensors,
        {"BK": BK, "GROUP": launch.GROUP, "STAGES": launch.STAGES, "ACTIVATION": f},
        options={"maxnreg": launch.REGISTERS},
    )
    assert got.stack == 0 and got.instructions["wgmma"] == 16 and got.instructions["tma"] > 0
    assert got.shared <= arches.named("sm_90").shared
