"""The sm_90 kernels compiled where no GPU need be: wgmma, shared memory, registers, no spills.

The calls themselves are traced, so tiles and arguments are those of a real launch.
"""

from typing import Any

import pytest
import torch

from slipstream.compiler.arch import ARCHS
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from tests.support.sass import disassemble, most_spilled, overwritten
from tests.support.uniform_registers import unwritten

# of slipstream.kernels.attention.sm90.common, which imports Triton
LEFT, SOFTCAP, PACKED_Q = 1, 4, 16

pytestmark = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, and its compiler"
)

# bytes of stack a thread, by a part of the kernel's name, the width of a head, and what it has:
# words that are kept from before a loop over tiles till after it; forward by ptxas 13.0 alone
STACK = {
    ("fwd", 128, "packed window"): 16,
    ("fwd", 128, "window"): 16,
    ("bwd", 64, "packed softcap"): 8,
}


def call_of(D: int, options: AttentionOptions, packed: bool, DV: int = 0) -> Any:
    def call(device: torch.device) -> None:
        from slipstream.kernels.attention.sm90 import launch

        def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        # more units of work than multiprocessors
        terms = AttentionInputs(*(make(1, 5000, h, x) for h, x in ((4, D), (2, D), (2, DV or D))))
        if packed:
            cu = make(4, dtype=torch.int32)
            terms = terms._replace(cu_q=cu, cu_k=cu)
        o, lse = launch.forward(terms, options)
        if DV in (0, D):
            launch.backward(terms, options, o, lse, torch.empty_like(o), None)

    return call


@pytest.mark.parametrize(
    "D", [pytest.param(64, marks=pytest.mark.slow), 128, pytest.param(256, marks=pytest.mark.slow)]
)
def test_causal_attention_compiles(D: int) -> None:
    check(call_of(D, AttentionOptions(0.1, -1, 0), packed=False))


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("options", [AttentionOptions(0.1), AttentionOptions(0.1, 100, 20)])
def test_packed_attention_compiles(D: int, options: AttentionOptions) -> None:
    check(call_of(D, options, packed=True))


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 128, 256])
def test_attention_with_a_window_compiles(D: int) -> None:
    check(call_of(D, AttentionOptions(0.1, 100, 20), packed=False))


def test_forward_without_mask_compiles() -> None:
    check(call_of(64, AttentionOptions(0.1), packed=False), only="fwd")


@pytest.mark.slow
def test_forward_of_two_widths_compiles() -> None:
    check(call_of(192, AttentionOptions(0.1, -1, 0), packed=False, DV=128), only="fwd_sm90")


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("right", [0, -1])
def test_softcap_compiles(D: int, right: int) -> None:
    call = call_of(D, AttentionOptions(0.1, -1, right, 5.0), packed=True)
    check(call)


def check(call: Any, only: str = "") -> None:
    from slipstream.compiler.trace import trace

    jobs = [j for j in trace(call, "sm_90", backward=False) if j.name.endswith("sm90_kernel")]
    jobs = [j for j in jobs if only in j.name]
    fused = any("bwd" in job.name for job in jobs)
    assert len(jobs) == (1 if only else 2 if fused else 3)
    for job in jobs:
        got = job.compile()
        assert got.shared <= ARCHS["sm_90"].shared, job.name
        assert got.instructions["wgmma"] and got.instructions["tma"], job.name
        assert not got.instructions["mma.sync"], job.name
        # who takes a unit of the forward, by a counter
        assert not got.instructions["atomic"] or "fwd" in job.name, job.name
        part, width = job.name.split("_")[1], job.constants["D"]
        flags = job.constants["FLAGS"]
        has = "window" if flags & LEFT else "softcap" if flags & SOFTCAP else ""
        has = f"packed {has}" if flags & PACKED_Q and has else has
        most = STACK.get((part, width, has), 0)
        assert got.stack <= most, f"{job.name}: {got.stack} bytes spilled"
        text = disassemble(got.asm["cubin"])
        products = text.count("HGMMA")
        # where the assembler serialises them there is a wait for each
        assert text.count("WARPGROUP.DEPBAR") * 3 <= products, job.name
        assert not most_spilled(text), job.name
        assert not overwritten(text), job.name
        assert not unwritten(text), job.name
