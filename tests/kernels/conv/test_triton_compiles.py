"""The short convolution's kernels compiled for GPUs that need not be there: spills."""

import pytest

from slipstream.compiler.aot import Compiled, compile_kernel
from slipstream.kernels.conv.inputs import UNIT_WIDTHS
from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
MODULE = "slipstream.kernels.conv.triton.conv"
SCAN = "slipstream.kernels.conv.triton.bwd_rolling"


def compile_conv(
    arch: str, W: int, backward: bool, full: bool, dtype: str, D: int = 4096, unit: int = 0
) -> Compiled:
    """Full is with everything, and backward of packed sequences. D: channels of 4096; unit: of a
    head that is normalised."""
    from slipstream.kernels.conv.triton import launch

    tile, kernel = launch.FORWARD, f"{MODULE}:conv_fwd_kernel"
    if backward:
        tile = launch.BACKWARD if full else launch.BACKWARD_ROLLING
        kernel = f"{MODULE}:conv_bwd_kernel" if full else f"{SCAN}:conv_bwd_rolling_kernel"
    names = ["x", "w", *(["dy", "dx"] if backward else ["y"])]
    names += ["b", "s", *([] if backward else ["r"])] if full else []
    tensors = {f"{name}_ptr": dtype for name in names}
    tensors |= {"partial_ptr": "*fp32"} if backward else {}
    tensors |= {"positions_ptr": "*i32"} if full else {}
    BT = tile.BT if W <= 4 or tile.BT == 8 else tile.BT // 2
    tile, _ = launch._tile_of_output(tile, 0, unit)
    packed = {} if backward and full else {"UNIT": unit > 0}
    return compile_kernel(
        kernel,
        tensors,
        {"D": D, "SX": 4096, "W": W, "BT": BT, "BD": tile.BD, "SILU": True, **packed},
        target=arch,
        warps=tile.warps,
    )


@pytest.mark.parametrize("unit", UNIT_WIDTHS)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_normalised_heads_stay_within_a_warp(arch: str, backward: bool, unit: int) -> None:
    got = compile_conv(arch, 4, backward, False, "*bf16", D=1024, unit=unit)
    assert (got.stack, got.shared) == (0, 0)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_convolution_compiles(arch: str, backward: bool) -> None:
    assert compile_conv(arch, 4, backward, False, "*bf16").stack == 0
    assert compile_conv(arch, 4, backward, False, "*bf16", D=1024).stack == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("W", [1, 2, 4, 8])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_convolution_compiles_in_every_variant(
    arch: str, W: int, backward: bool, full: bool, dtype: str
) -> None:
    assert compile_conv(arch, W, backward, full, dtype).stack <= 512


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_small_convolution_kernels_compile(arch: str) -> None:
    def stack(kernel: str, tensors: dict[str, str], flags: dict[str, int], warps: int) -> int:
        got = compile_kernel(f"{MODULE}:{kernel}", tensors, flags, target=arch, warps=warps)
        return got.stack

    tensors = {"cu_ptr": "*i32", "positions_ptr": "*i32"}
    assert stack("conv_positions_kernel", tensors, {"B": 1024}, 4) == 0
    tensors = {f"{x}_ptr": "*bf16" for x in ("dy", "x", "w", "b", "s", "ds")} | {"cu_ptr": "*i64"}
    flags = {"D": 4096, "W": 4, "BD": 128, "SILU": True}
    assert stack("conv_state_bwd_kernel", tensors, {**flags, "SX": 4096}, 2) == 0
    tensors = {f"{x}_ptr": "*bf16" for x in ("x", "s", "w", "b", "r", "y")} | {"index_ptr": "*i32"}
    assert stack("conv_update_kernel", tensors, flags, 2) == 0
