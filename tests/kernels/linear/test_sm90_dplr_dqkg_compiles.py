"""The gradients' Gluon kernels of per-channel decay compiled for sm_90, which need not be there."""

import pytest
import torch

from slipstream.compiler.aot import Job
from slipstream.compiler.arch import ARCHS
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from tests.support.sass import arrives_early, disassemble, overwritten
from tests.support.uniform_registers import unwritten

pytestmark = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, and its compiler"
)

KERNELS = ["scores", "dqkg", "intra_safe_bwd"]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# transition, dtype, of gates, K, V, packed
CASES = {
    "kda": ("kda", BF16, FP32, 128, 128, False),
    "gdn2": ("gdn2", BF16, FP32, 128, 128, False),
    "dplr packed": ("dplr", BF16, FP32, 128, 128, True),
    "kda narrow": ("kda", FP16, FP32, 64, 128, True),
    "kda bf16 gates": ("kda", BF16, BF16, 128, 128, False),
    "dplr bf16 gates": ("dplr", BF16, BF16, 128, 128, False),
    "dplr fp16 gates": ("dplr", FP16, FP16, 64, 128, True),
}
# each transition and width, whole and packed, is in the others; tests/support/sm90_dplr.py has
# gates of 16 bits
FURTHER = ("kda narrow", "kda bf16 gates", "dplr bf16 gates", "dplr fp16 gates")


def terms(case: tuple, device: torch.device) -> LinearInputs:
    kind, dtype, gates, K, V, packed = case
    B, T, H, HV = 1 if packed else 2, 192, 1, 2

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, device=device, dtype=dtype)

    free, by_channel = kind == "dplr", kind == "gdn2"
    return LinearInputs(
        empty(B, T, H, K),
        empty(B, T, H, K),
        empty(B, T, HV, V),
        g=empty(B, T, HV, K, dtype=gates),
        beta=None if free or by_channel else empty(B, T, HV, dtype=FP32),
        erase=empty(B, T, HV, K) if by_channel else None,
        write=empty(B, T, HV, V) if by_channel else None,
        a=empty(B, T, H, K) if free else None,
        b=empty(B, T, H, K) if free else None,
        cu_seqlens=empty(3, dtype=torch.int32) if packed else None,
    )


def jobs(case: tuple) -> list[Job]:
    from slipstream.compiler.trace import trace
    from slipstream.kernels.linear.sm90.dplr import backend

    def call(device: torch.device) -> None:
        given = terms(case, device)
        backend.backward(given, torch.empty_like(given.v), None, 0.1)

    names = {f"dplr_{name}_sm90_kernel" for name in KERNELS}
    return [job for job in trace(call, "sm_90", backward=False) if job.name in names]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=pytest.mark.slow if name in FURTHER else ())
        for name, case in CASES.items()
    ],
)
def test_gradient_kernels_compile(case: tuple) -> None:
    found, free = jobs(case), case[0] == "dplr"
    # what writes by channel takes Triton's kernel for the gradients of scores
    wanted = KERNELS[1:] if case[0] == "gdn2" else KERNELS
    assert [job.name for job in found] == [f"dplr_{name}_sm90_kernel" for name in wanted]
    for job in found:
        got = job.compile()
        assert got.shared <= ARCHS["sm_90"].shared
        # of strong chunks: once a chunk, and with free a and b five sums of 64 x 64, read twice
        # within 16 tokens
        most = (112 if free else 56) if "safe" in job.name else 0
        assert got.stack <= most, f"{job.name}: {got.stack} bytes spilled"
        assert got.instructions["wgmma"] > 0 and got.instructions["tma"] >= 5
        assert got.instructions["mma.sync"] == got.instructions["atomic"] == 0
        assert not arrives_early(got.ptx)
        text = disassemble(got.asm["cubin"])
        assert not overwritten(text)
        assert not unwritten(text)


def test_early_arrivals_are_found() -> None:
    store, meet = "st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5};", "bar.sync 2, 128;"
    arrival = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r6];"
    assert arrives_early("\n".join([meet, store, arrival])) == [(store, arrival)]
    assert not arrives_early("\n".join([store, meet, arrival]))


def test_overwritten_operands_are_found() -> None:
    product = "HGMMA.64x32x16.F32.BF16 R56, R32, gdesc[UR4].tnspB, RZ, !UPT ;"
    constant = "IMAD.MOV.U32 R33, RZ, RZ, 0x3f803f80 ;"
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
    assert len(overwritten("\n".join([product, constant, wait]))) == 1
    assert len(overwritten("\n".join([product, "LDS.128 R28, [R4] ;", wait]))) == 0
    assert not overwritten("\n".join([constant, product, wait, constant]))
    assert not overwritten("\n".join([product, "STS [R33], R32 ;", wait]))
