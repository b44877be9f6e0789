"""The kernels around RWKV-7's recurrence compiled for GPUs that need not be there: spills."""

import pytest

from slipstream.compiler.aot import compile_kernel
from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
MODULE = "slipstream.kernels.time_mix.triton.rwkv7"
STEP = "slipstream.kernels.time_mix.triton.rwkv7_step"
TERMS = ("w_ptr", "k_ptr", "a_ptr", "v_ptr", "v_gate_ptr", "first_value_ptr", "k_k_ptr", "k_a_ptr")
TERMS += ("w_bias_ptr", "a_bias_ptr", "v_bias_ptr")
MADE = ("k_out_ptr", "a_out_ptr", "b_out_ptr", "v_out_ptr")
OUTPUT = ("o_ptr", "r_ptr", "k_ptr", "v_ptr", "gate_ptr", "weight_ptr", "bias_ptr", "r_k_ptr")
GRADS = ("dw_ptr", "dk_ptr", "da_ptr", "dv_ptr", "dv_gate_ptr", "dfirst_value_ptr")
KERNELS = {
    "rwkv7_terms_fwd": ((*TERMS, *MADE), ("w_out_ptr",), ("slowest", "eps")),
    "rwkv7_terms_bwd": (
        (*TERMS, *(f"d{name}" for name in MADE), "dk_read_ptr", "dv_read_ptr", *GRADS),
        ("dw_out_ptr", "partial_ptr"),
        ("slowest", "eps"),
    ),
    "rwkv7_output_fwd": ((*OUTPUT, "y_ptr"), (), ("eps",)),
    "rwkv7_output_bwd": (
        (*OUTPUT, "dy_ptr", "do_ptr", "dr_ptr", "dk_ptr", "dv_ptr", "dgate_ptr"),
        ("partial_ptr",),
        ("eps",),
    ),
}


@pytest.mark.parametrize("K", [64, 128, 256])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_rwkv7_compiles(arch: str, kernel: str, K: int) -> None:
    narrow, wide, numbers = KERNELS[kernel]
    given = dict.fromkeys(narrow, "*bf16") | dict.fromkeys(wide, "*fp32")
    given |= dict.fromkeys(numbers, "fp32") | {"R": "i32"}
    from slipstream.kernels.time_mix.triton import rwkv7

    terms = rwkv7._terms_tile(K)
    tiles = {"rwkv7_terms_bwd": terms, "rwkv7_output_bwd": rwkv7.OUTPUT_BACKWARD}
    elements, _, warps = tiles.get(kernel, (rwkv7.FORWARD, 0, 4))
    flags = {"D": 1024, "K": K, "BR": max(elements // K, 1), "BK": K}
    one = kernel.startswith("rwkv7_output")  # forward and backward
    name = f"{MODULE}:{'rwkv7_output' if one else kernel}_kernel"
    assert compile_kernel(name, given, flags, target=arch, warps=warps).stack == 0


@pytest.mark.parametrize(("K", "stack"), [(64, 0), (128, 256)])
def test_rwkv7_step_compiles(K: int, stack: int) -> None:
    from slipstream.kernels.time_mix.rwkv7_step import TOKENS, StepInputs
    from slipstream.kernels.time_mix.triton import rwkv7_step

    given = {f"{name}_ptr": "*bf16" for name in (*StepInputs._fields, "shift", "y")}
    given |= {"state_ptr": "*fp32", **{f"row_{name}": "i32" for name in (*TOKENS, "shift")}}
    given |= {f"{name}_rank": "i32" for name in "wagv"}
    given |= dict.fromkeys(("slowest", "unit_eps", "eps"), "fp32")
    flags = {"D": 1024, "K": K, "BK": K, "BR": rwkv7_step.RANKS}
    warps = K * K // rwkv7_step.ELEMENTS_PER_WARP
    kernel = f"{STEP}:rwkv7_step_kernel"
    assert compile_kernel(kernel, given, flags, target="sm_90", warps=warps).stack <= stack
