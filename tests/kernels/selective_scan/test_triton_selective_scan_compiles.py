"""The selective scan's Triton kernels compiled for GPUs that need not be there."""

from typing import Any

import pytest

from slipstream.compiler.arch import ARCHS
from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")

FOLDER = "slipstream.kernels.selective_scan.triton"


def compile_scan(back: bool, x: str, capability: int, D: int = 2048, packed: bool = False) -> Any:
    from slipstream.compiler.aot import compile_kernel
    from slipstream.kernels.selective_scan.triton import launch

    narrow = ("u", "delta", "z", *(("dy", "du", "ddelta", "dz") if back else ("y",)))
    wide = ("A", "B", "C", "D", "bias", "states")
    wide += ("carry", "dA", "dB", "dC", "dD", "dbias") if back else ("final",)
    tensors = dict.fromkeys([f"{n}_ptr" for n in narrow], x)
    tensors |= dict.fromkeys([f"{n}_ptr" for n in wide], "*fp32")
    tensors |= {"cu_ptr": "*i32"} if packed else {}
    rows = dict.fromkeys(["u_row", "delta_row", "z_row", *(["dy_row"] if back else [])], "i32:16")
    tile = launch.BACKWARD if back else launch.FORWARD
    vec = tile.VEC if D % tile.VEC == 0 else 1
    constants = {"D": D, "N": 16, "G": 1, "SOFTPLUS": True, "VEC": vec}
    name = "backward" if back else "forward"
    return compile_kernel(
        f"{FOLDER}.{name}:selective_scan_{name}_kernel",
        tensors,
        {**constants, "RUN": tile.RUN, "RUNS": tile.RUNS, "BD": tile.BD},
        rows,
        target=f"sm_{capability}",
        warps=tile.warps,
    )


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("x", ["*bf16", "*fp32"])
@pytest.mark.parametrize("capability", [80, 86, 90])
@pytest.mark.sample(which=lambda back, x, capability: capability == 90 and x == "*bf16")
def test_selective_scan_compiles(back: bool, x: str, capability: int) -> None:
    got = compile_scan(back, x, capability)
    assert got.stack <= 32, f"{got.stack} bytes spilled"
    assert got.shared <= ARCHS[f"sm_{capability}"].shared
    # a run's tokens are a thread's: a scan over them is no shuffle
    vec = 2 if back else 4
    assert f"sizePerThread = [1, {vec}], threadsPerWarp = [8, 4]" in got.asm["ttgir"]


@pytest.mark.parametrize("D", [1, 100, 700])
@pytest.mark.sample(which=lambda D: D == 1)
def test_selective_scan_compiles_for_odd_widths(D: int) -> None:
    for back in (False, True):
        got = compile_scan(back, "*bf16", 90, D, packed=True)
        assert got.stack <= 32, f"{got.stack} bytes spilled"
        assert got.shared <= ARCHS["sm_90"].shared
