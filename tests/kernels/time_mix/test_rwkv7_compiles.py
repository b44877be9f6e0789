"""The kernels around RWKV-7's recurrence compiled for GPUs that need not be there: spills."""

from typing import Any

import pytest
import torch

from slipstream.compiler.aot import compile_kernel
from slipstream.compiler.trace import trace
from slipstream.kernels.time_mix import low_rank
from slipstream.ops import rwkv7_step
from slipstream.runtime.backends import HAVE_TRITON
from tests.support.rwkv7_steps import Sizes, low_rank_inputs, make

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
MODULE = "slipstream.kernels.time_mix.triton.rwkv7"
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


@pytest.mark.parametrize(
    ("K", "v_first", "stack"), [(64, False, 0), (64, True, 0), (128, False, 0), (256, False, 300)]
)
def test_rwkv7_step_compiles(K: int, v_first: bool, stack: int) -> None:
    n = Sizes(K=K, dtype=torch.bfloat16)
    args: Any = make(n)

    def call(device: torch.device) -> None:
        given: Any = {
            m: torch.empty(x.shape, dtype=x.dtype, device=device) for m, x in args.items()
        }
        at = torch.empty(n.N, dtype=torch.int32, device=device)
        rwkv7_step(**given, state_indices=at, state_v_first=v_first, impl="triton")

    (job,) = (x for x in trace(call, "sm_90", backward=False) if "rwkv7_step" in x.kernel)
    made = job.compile()
    assert made.stack <= stack
    # a tile of the state is read by loads of 16 bytes, all of them before anything is stored
    loads = made.ptx[: made.ptx.index("st.global.v4")].count("v4.b32 {")
    assert loads >= min(K * K, 16384) // (4 * 32 * job.warps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_rank_step_compiles(dtype: torch.dtype) -> None:
    given = low_rank_inputs(17, 64, (32, 32, 160, 32), dtype)

    def call(device: torch.device) -> None:
        sizes = [None if x is None else x.shape for x in given]
        made = [None if n is None else torch.empty(n, dtype=dtype, device=device) for n in sizes]
        low_rank.low_rank(low_rank.LowRankInputs._make(made), "triton")

    (job,) = (x for x in trace(call, "sm_90", backward=False) if "low_rank" in x.kernel)
    made = job.compile()
    assert made.stack == 0 and made.shared <= 100 << 10
