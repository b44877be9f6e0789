"""The backward of attention over the depth compiled for sm_90, which need not be there: spills."""

import pytest

from slipstream.compiler.aot import compile_kernel
from slipstream.kernels.attnres.sm90 import plan
from slipstream.runtime.backends import HAVE_TRITON
from tests.support.triton_release import HAS_GLUON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
SUMS = {f"{name}_ptr": "*fp32" for name in ("s", "rstd", "lse")}


@pytest.mark.skipif(not HAS_GLUON, reason="its kernels are for other releases of Triton")
@pytest.mark.parametrize(
    ("L", "D", "normed"),
    [(16, 7168, False)]
    + [(L, D, x) for L, D in ((9, 4096), (4, 2048), (3, 1000), (6, 5120)) for x in (False, True)],
)
def test_sm90_backward_compiles(L: int, D: int, normed: bool) -> None:
    tensors = {f"{x}{i}_ptr": "*bf16" for i in range(L) for x in "vd"} | SUMS | {"da_ptr": "*fp32"}
    tensors |= {f"{name}_ptr": "*bf16" for name in ("q", "w", "dy")}
    if normed:
        tensors |= {"wo_ptr": "*bf16", "dwo_ptr": "*fp32"}
    tile = plan.tile(L, D, normed)
    got = compile_kernel(
        "slipstream.kernels.attnres.sm90.backward:attnres_bwd_sm90_kernel",
        tensors,
        {"L": L, "LP": 1 << (L - 1).bit_length(), "D": D, **tile._asdict()},
        scalars={"R": "i32", "eps": "fp32", "scale": "fp32"},
        warps=tile.WARPS,
        target="sm_90",
    )
    # a multiprocessor has room for the programs that are started on it
    programs = plan.programs(L, tile, normed)
    assert got.stack == 0 and got.shared <= plan.shared_bytes(L, tile, normed)
    assert programs * got.registers * 32 * tile.WARPS <= 65536
    assert got.instructions["cp.async"] > 0
