"""The loss kernels compiled for GPUs that need not be there: spills."""

import pytest

from slipstream.compiler.aot import compile_kernel
from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
MODULE = "slipstream.kernels.loss.triton.cross_entropy"


@pytest.mark.parametrize("V", [100, 4000, 32000, 151936])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.sample(which=lambda arch, V, plain: (arch == "sm_90") == (V != 32000))
def test_cross_entropy_compiles(arch: str, V: int, plain: bool) -> None:
    from slipstream.kernels.loss.triton import launch
    from slipstream.kernels.primitives import logit_chunks

    BV, warps = launch._tile(V, 2)
    tensors = {"logits_ptr": "*bf16", "grad_ptr": "*bf16", "target_ptr": "*i64"}
    tensors |= {"loss_ptr": "*fp32", "weight_ptr": "*fp32"}
    scalars = dict.fromkeys(("smoothing", "smoothing_each", "softcap", "z_loss", "scale"), "fp32")
    scalars |= {"stride": "i32:16", "grad_stride": "i32:16"}
    flags = {"V": V, "BV": BV, "INNER": 8, "CAP": not plain, "SMOOTH": not plain}
    flags |= {"HAS_LSE": False, "SHARD": not plain}
    if not plain:
        tensors["z_sum_ptr"] = "*fp32"
    got = compile_kernel(
        f"{MODULE}:cross_entropy_kernel",
        tensors,
        {**flags, "STAGES": logit_chunks.STAGES},
        scalars=scalars,
        target=arch,
        warps=warps,
    )
    assert got.stack == 0


def test_rows_that_stay_in_the_cache_have_more_warps() -> None:
    from slipstream.kernels.loss.triton import launch

    tiles = {V: launch._tile(V, 2) for V in (100, 4000, 8191, 8192, 32000, 40960, 40961, 151936)}
    few, many = {8191, 40961, 151936}, {8192, 32000, 40960}
    assert {V for V, tile in tiles.items() if tile == (4096, 4)} - {4000} == few
    assert {V for V, tile in tiles.items() if tile == launch.CACHED_TILE} == many
    assert launch._tile(32000, 4) == (4096, 4)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_scale_compiles(arch: str) -> None:
    tensors = {"x_ptr": "*bf16", "s_ptr": "*fp32"}
    assert compile_kernel(f"{MODULE}:scale_kernel", tensors, {"B": 2048}, target=arch).stack == 0


@pytest.mark.parametrize("V", [100, 32000, 151936])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.sample(which=lambda arch, V: (arch == "sm_90") == (V != 32000))
def test_kl_div_compiles(arch: str, V: int) -> None:
    from slipstream.kernels.primitives import logit_chunks

    BV, warps = next((BV, warps) for most, BV, warps in logit_chunks.TILES if most >= V)
    tensors = {"s_ptr": "*bf16", "t_ptr": "*bf16", "grad_ptr": "*bf16", "live_ptr": "*i1"}
    tensors |= {"loss_ptr": "*fp32", "weight_ptr": "*fp32"}
    scalars = dict.fromkeys(("s_stride", "t_stride", "grad_stride"), "i32:16")
    got = compile_kernel(
        "slipstream.kernels.loss.triton.kl_div:kl_div_kernel",
        tensors,
        {"V": V, "BV": BV, "INNER": 8, "STAGES": logit_chunks.STAGES},
        scalars={**scalars, "temperature": "fp32"},
        target=arch,
        warps=warps,
    )
    assert got.stack == 0
