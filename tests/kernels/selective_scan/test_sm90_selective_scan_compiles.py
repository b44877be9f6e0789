"""The selective scan's Gluon kernels compiled for sm_90, which need not be there."""

from typing import Any

import pytest

from slipstream.compiler.arch import ARCHS
from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")

FOLDER = "slipstream.kernels.selective_scan.sm90"


def compile_scan(back: bool, x: str, tile: int, N: int = 16, packed: bool = False) -> Any:
    from slipstream.compiler.aot import compile_kernel
    from slipstream.kernels.selective_scan.sm90 import launch, plan

    narrow = ("u", "delta", "z", "B", "C", *(("dy", "du", "ddelta", "dz") if back else ("y",)))
    wide = ("A", "D", "bias", "states")
    wide += ("dA", "dB", "dC", "dD", "dbias") if back else ("final",)
    tensors = dict.fromkeys([f"{n}_ptr" for n in narrow], x)
    tensors |= dict.fromkeys([f"{n}_ptr" for n in wide], "*fp32")
    tensors |= {"cu_ptr": "*i32", "s_in_ptr": "*fp32"} if packed else {}
    rows = ["u_row", "delta_row", "z_row", "B_row", "C_row", *(["dy_row"] if back else [])]
    chosen, _ = (launch.BACKWARD if back else launch.FORWARD)[tile]
    times = max(N // 16, 1)
    constants = {"D": 2048, "N": N, "G": 1, "SOFTPLUS": True, "T": plan.CHUNK, "NP": N}
    constants |= {"CHANNELS": chosen.CHANNELS, "LANES": chosen.LANES * times}
    constants |= {"WARPS": chosen.warps * times}
    name = "backward" if back else "forward"
    return compile_kernel(
        f"{FOLDER}.{name}:selective_scan_{name}_sm90_kernel",
        tensors,
        constants | ({"SUB": launch.SUB} if back else {}),
        dict.fromkeys(rows, "i32:16"),
        target="sm_90",
        warps=chosen.warps * times,
    )


@pytest.mark.parametrize(("back", "tile"), [(x, i) for x in (False, True) for i in range(2 + x)])
@pytest.mark.sample(which=lambda back, tile: tile == 0)
def test_sm90_selective_scan_compiles(back: bool, tile: int) -> None:
    got = compile_scan(back, "*bf16", tile)
    assert got.stack <= 32, f"{got.stack} bytes spilled"
    assert got.shared <= ARCHS["sm_90"].shared // 6, "fewer than six programs on a multiprocessor"


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.sample(which=lambda back: not back)
def test_sm90_selective_scan_compiles_for_wide_states(back: bool) -> None:
    got = compile_scan(back, "*fp32", 0, N=32, packed=True)
    assert got.stack <= 64, f"{got.stack} bytes spilled"
