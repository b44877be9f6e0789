"""The scan's Triton kernels compiled for GPUs that need not be there."""

import re
from typing import Any

import pytest

from slipstream.core.arch import ARCHS
from slipstream.kernels.launching import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")

KERNELS = ("ends", "walk", "after", "back")
TYPES = {2: "*bf16", 4: "*fp32"}


def compile_scan(kernel: str, bytes_each: int, D: int, capability: int, packed: bool) -> Any:
    from slipstream.core.aot import compile_kernel
    from slipstream.kernels.scan.triton import launch

    x = TYPES[bytes_each]
    wide = "*fp32"
    tensors = {"x_ptr": x, "g_ptr": wide} | ({"cu_ptr": "*i32"} if packed else {})
    tensors |= {
        "ends": {"sum_ptr": wide, "end_ptr": wide},
        "walk": {"y_ptr": x, "s_in_ptr": wide, "s_out_ptr": wide, "after_ptr": wide},
        "after": {"x_ptr": wide, "y_ptr": wide, "s_in_ptr": wide},
        "back": {
            "y_ptr": x,
            "s_in_ptr": wide,
            "s_out_ptr": wide,
            "after_ptr": wide,
            "h_ptr": x,
            "initial_ptr": wide,
            "dg_ptr": wide,
        },
    }[kernel]
    tile = launch.BACKWARD if kernel == "back" else launch.FORWARD
    constants = {"D": D, "RUN": tile.RUN, "RUNS": tile.RUNS, "BD": tile.BD, "L": launch.SEGMENT}
    constants["STAGES"] = tile.stages
    constants["REVERSE"] = kernel == "back"
    if kernel != "ends":
        constants["UNIT"] = launch.SEGMENT if kernel == "after" else 1
    name = "scan_ends_kernel" if kernel == "ends" else "scan_walk_kernel"
    path = f"slipstream.kernels.scan.triton.scan:{name}"
    return compile_kernel(path, tensors, constants, target=f"sm_{capability}", warps=tile.warps)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bytes_each", [2, 4])
@pytest.mark.parametrize("capability", [80, 86, 90])
def test_scan_compiles(kernel: str, bytes_each: int, capability: int) -> None:
    got = compile_scan(kernel, bytes_each, 2048, capability, packed=False)
    assert got.stack <= 32, f"{got.stack} bytes spilled"
    # tiles are loaded in advance
    assert 0 < got.shared <= ARCHS[f"sm_{capability}"].shared
    assert got.instructions["cp.async"] > 0
    # a run's rows are a thread's
    layout = r"<\{sizePerThread = \[1, 1, \d\], threadsPerWarp = \[\d+, 1, "
    assert re.search(layout, got.asm["ttgir"])


@pytest.mark.parametrize("D", [1, 100, 700])
def test_scan_compiles_for_odd_widths(D: int) -> None:
    for kernel in KERNELS:
        compile_scan(kernel, 2, D, 90, packed=True)
