"""The short convolution's kernels compiled for GPUs that need not be there: spills."""

import pytest

from slipstream.compiler.aot import Compiled, compile_kernel
from slipstream.kernels.conv.inputs import UNIT_WIDTHS
from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
MODULE = "slipstream.kernels.conv.triton.conv"
BACKWARD = "slipstream.kernels.conv.triton.backward:conv_bwd_kernel"


def compile_conv(
    arch: str, W: int, backward: bool, full: bool, dtype: str, D: int = 4096, unit: int = 0
) -> Compiled:
    """Full is packed, with everything. D: channels of 4096; unit: of a head that is normalised."""
    from slipstream.kernels.conv.triton import launch

    tile = launch.BACKWARD if backward else launch.FORWARD
    names = ["x", "w", *(["dy", "dx"] if backward else ["y"])]
    names += ["b", "s", "ds" if backward else "r"] if full else []
    tensors = {f"{name}_ptr": dtype for name in names}
    tensors |= {"partial_ptr": "*fp32"} if backward else {}
    tensors |= {"cu_ptr": "*i64"} if full else {}
    tile, _ = launch._tile_of_output(tile, 0, unit)
    constants = {"D": D, "SX": 4096, "W": W, "BT": tile.BT, "BD": tile.BD, "SILU": True}
    kernel = BACKWARD if backward else f"{MODULE}:conv_fwd_kernel"
    constants["UNIT"] = unit > 0
    return compile_kernel(kernel, tensors, constants, target=arch, warps=tile.warps)


@pytest.mark.parametrize("unit", UNIT_WIDTHS)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_normalised_heads_stay_within_a_warp(arch: str, backward: bool, unit: int) -> None:
    got = compile_conv(arch, 4, backward, False, "*bf16", D=1024, unit=unit)
    assert (got.stack, got.shared) == (0, 0)
    assert compile_conv(arch, 4, backward, True, "*bf16", D=1024, unit=unit).stack == 0


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
def test_convolution_update_compiles(arch: str) -> None:
    tensors = {f"{x}_ptr": "*bf16" for x in ("x", "s", "w", "b", "r", "y")} | {"index_ptr": "*i32"}
    flags = {"D": 4096, "W": 4, "BD": 128, "SILU": True}
    got = compile_kernel(f"{MODULE}:conv_update_kernel", tensors, flags, target=arch, warps=2)
    assert got.stack == 0
