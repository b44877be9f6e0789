"""The scan's Triton kernels compiled for GPUs that need not be there."""

import re
from typing import Any

import pytest

from slipstream.compiler.arch import ARCHS
from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")

TYPES = {2: "*bf16", 4: "*fp32"}


def compile_scan(back: bool, bytes_each: int, D: int, capability: int, packed: bool) -> Any:
    from slipstream.compiler.aot import compile_kernel
    from slipstream.kernels.gated_scan.triton import launch

    x, wide = TYPES[bytes_each], "*fp32"
    tensors = {"x_ptr": x, "g_ptr": wide, "y_ptr": x, "s_in_ptr": wide, "s_out_ptr": wide}
    tensors |= {"word_ptr": "*i64"} | ({"cu_ptr": "*i32"} if packed else {})
    if back:
        tensors |= {"h_ptr": x, "initial_ptr": wide, "dg_ptr": wide}
    tile = launch.BACKWARD if back else launch.FORWARD
    constants = {"D": D, "RUN": tile.RUN, "RUNS": tile.RUNS, "BD": tile.BD}
    return compile_kernel(
        "slipstream.kernels.gated_scan.triton.scan:scan_kernel",
        tensors,
        {**constants, "REVERSE": back},
        target=f"sm_{capability}",
        warps=tile.warps,
    )


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("bytes_each", [2, 4])
@pytest.mark.parametrize("capability", [80, 86, 90])
@pytest.mark.sample(
    which=lambda back, bytes_each, capability: capability == 90 or (bytes_each == 2) == back
)
def test_scan_compiles(back: bool, bytes_each: int, capability: int) -> None:
    got = compile_scan(back, bytes_each, 2048, capability, packed=False)
    assert got.stack <= 32, f"{got.stack} bytes spilled"
    assert 0 < got.shared <= ARCHS[f"sm_{capability}"].shared
    # a run's rows are a thread's
    layout = r"<\{sizePerThread = \[1, 1, \d\], threadsPerWarp = \[\d+, 1, "
    assert re.search(layout, got.asm["ttgir"])


@pytest.mark.parametrize("D", [1, 100, 700])
def test_scan_compiles_for_odd_widths(D: int) -> None:
    for back in (False, True):
        got = compile_scan(back, 2, D, 90, packed=True)
        # of one channel a thread has all steps: 352 bytes by ptxas 12.8
        assert got.stack <= (384 if D == 1 else 32), f"{got.stack} bytes spilled"
        assert 0 < got.shared <= ARCHS["sm_90"].shared
