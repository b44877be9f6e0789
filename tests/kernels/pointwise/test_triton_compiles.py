"""Rotary and gated activations compiled for GPUs that need not be there: spills."""

import pytest

from slipstream.compiler.aot import compile_kernel
from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
PACKAGE = "slipstream.kernels.elementwise.triton"
archs = pytest.mark.parametrize("arch", ["sm_80", "sm_90"])


@archs
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_compiles(arch: str, interleaved: bool) -> None:
    tensors = {"x_ptr": "*bf16", "y_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    flags = {"H": 32, "D": 128, "HALF": 48, "BH": 32, "BP": 64}
    got = compile_kernel(
        f"{PACKAGE}.rotary:rotary_kernel",
        {**tensors, "position_ptr": "*i64", "records_ptr": "*i64"},
        {**flags, "INTERLEAVED": interleaved, "BACK": True, "RECORDS": 4096, "NAME": 2},
        target=arch,
    )
    assert got.stack == 0


@archs
@pytest.mark.parametrize("wanted", ["y", "grads", "y and grads"])
@pytest.mark.parametrize("f", ["silu", "gelu", "sigmoid", "relu2"])
@pytest.mark.sample(which=lambda arch, f, wanted: (arch == "sm_90") == (f in ("silu", "relu2")))
def test_glu_compiles(arch: str, f: str, wanted: str) -> None:
    names = [
        "gate",
        *(["dy", "dgate"] if "grads" in wanted else []),
        *(["y"] if "y" in wanted else []),
    ]
    if f != "relu2":
        names += ["up", *(["dup"] if "grads" in wanted else [])]
    got = compile_kernel(
        f"{PACKAGE}.glu:glu_kernel",
        {f"{name}_ptr": "*bf16" for name in names},
        {"F": f, "D": 8192, "BR": 2, "BD": 1024},
        scalars={"gate_stride": "i32:16", "up_stride": "i32:16"},
        target=arch,
    )
    assert got.stack == 0


@pytest.mark.parametrize("cu", [None, "*i32", "*i64"])
@archs
def test_token_shift_compiles(arch: str, cu: str | None) -> None:
    tensors = {f"{name}_ptr": "*bf16" for name in ("x", "edge", "y", "end")}
    for back in (False, True):
        got = compile_kernel(
            f"{PACKAGE}.token_shift:token_shift_kernel",
            {**tensors, **({} if cu is None else {"cu_ptr": cu})},
            {"BT": 16, "BD": 256, "BACK": back},
            scalars={"stride_b": "i32:16", "stride_t": "i32:16", "D": "i32:16"},
            target=arch,
        )
        assert got.stack == 0


@archs
@pytest.mark.parametrize("pool", ["*fp32", "*bf16"])
@pytest.mark.parametrize("reads", [True, False])
def test_copy_states_compiles(arch: str, pool: str, reads: bool) -> None:
    """From a pool to rows that lie K first, and back."""
    x, y, slots = (pool, "*fp32", "from_ptr") if reads else ("*fp32", pool, "to_ptr")
    one, other = ("x_k", "y_v") if reads else ("y_k", "x_v")
    names = [f"{z}_{n}" for z in "xy" for n in ("state", "head", "v", "k")]
    sizes = [*(n for n in names if n not in (one, other)), "HV", "V", "K"]
    got = compile_kernel(
        f"{PACKAGE}.copy_states:copy_states_kernel",
        {"x_ptr": x, "y_ptr": y, slots: "*i32"},
        {"BV": 64, "BK": 64, one: 1, other: 1},
        scalars=dict.fromkeys(sizes, "i32:16"),
        target=arch,
    )
    assert got.stack == 0


@archs
def test_place_tokens_compiles(arch: str) -> None:
    tensors = {f"{x}{i}_ptr": "*bf16" for x in "xy" for i in range(5)} | {"counts_ptr": "*i64"}
    scalars = {f"{x}{i}": "i32:16" for x in ("stride", "D") for i in range(6)}
    kernel = f"{PACKAGE}.place_tokens:place_tokens_kernel"
    got = compile_kernel(kernel, tensors, {"T": 64, "BD": 1024}, scalars=scalars, target=arch)
    assert got.stack == 0
