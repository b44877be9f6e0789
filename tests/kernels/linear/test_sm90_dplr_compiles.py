"""The Gluon kernels of per-channel decay, and of free a and b, compiled for sm_90."""

from unittest import mock

import pytest
import torch

from slipstream.compiler.aot import Job
from slipstream.compiler.arch import ARCHS
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from tests.support.linear_compiled import INVERSE
from tests.support.sass import arrives_early, disassemble, overwritten
from tests.support.uniform_registers import unwritten

pytestmark = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, and its compiler"
)

# delta, gated, 16-bit dtype, K, V, packed, erase and write by channel
CASES = {
    "kda": (True, True, torch.bfloat16, 128, 128, False),
    "kda_narrow": (True, True, torch.float16, 64, 64, True),
    "dplr": (False, True, torch.bfloat16, 128, 128, True),
    "iplr": (False, False, torch.bfloat16, 64, 128, False),
    "rwkv7": (False, True, torch.bfloat16, 64, 64, False),
    "gdn2": (True, True, torch.bfloat16, 128, 128, False, True),
}
# the transitions, and the widths, whole; scans of segments
SAMPLE = {False: ("kda_narrow", "dplr", "iplr", "gdn2"), True: ("kda",)}
# bytes of stack a thread of dplr_intra_safe with free a and b, whose scores of four kinds wait in
# registers while the levels are made
STACK = {"dplr": 120, "rwkv7": 96, "kda": 16, "gdn2": 48}
WY_STACK = {"dplr": 48, "gdn2": 16}


def terms(case: tuple, device: torch.device) -> LinearInputs:
    delta, gated, dtype, K, V, packed, *by_channel = case
    B, T, H, HV = 1, 192, 1, 2

    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(*shape, device=device, dtype=dtype)

    q, k, a, b = (ones(B, T, H, K, dtype=dtype) for _ in range(4))
    return LinearInputs(
        q,
        k,
        ones(B, T, HV, V, dtype=dtype),
        g=ones(B, T, HV, K) if gated else None,
        beta=ones(B, T, HV) if delta and not by_channel else None,
        erase=ones(B, T, HV, K, dtype=dtype) if by_channel else None,
        write=ones(B, T, HV, V, dtype=dtype) if by_channel else None,
        a=None if delta else a,
        b=None if delta else b,
        cu_seqlens=torch.ones(3, dtype=torch.int32, device=device) if packed else None,
    )


def jobs(case: tuple, split: bool) -> dict[str, Job]:
    """By name, forward and back."""
    from slipstream.compiler.trace import trace
    from slipstream.kernels.linear.segments import split_into_segments
    from slipstream.kernels.linear.sm90.dplr import backend

    def call(device: torch.device) -> None:
        given = terms(case, device)
        with mock.patch.object(
            backend.Sm90Dplr,
            "choose_segments",
            lambda self, x: split_into_segments(x, 64 if split else None),
        ):
            backend.forward(given, 0.1)
            backend.backward(given, given.v, None, 0.1)

    own = ("wy", "intra_safe", "chunk_fwd", "chunk_dstate")
    names = {f"dplr_{name}_sm90_kernel" for name in own}
    found = [job for job in trace(call, "sm_90", backward=False) if job.name in names]
    return {f"{job.name} {n}": job for n, job in enumerate(found)}


@pytest.mark.parametrize(
    ("name", "split"),
    [
        pytest.param(name, split, id=f"{kind}-{name}", marks=marks)
        for kind, split in (("whole", False), ("segments", True))
        for name in CASES
        for marks in [pytest.mark.slow if name not in SAMPLE[split] else ()]
    ],
)
def test_dplr_kernels_compile(name: str, split: bool) -> None:
    case = CASES[name]
    found = jobs(case, split)
    if split:  # the others are the same
        found = {name: job for name, job in found.items() if "chunk" in name}
        assert len(found) == 5
        check(found)
        return
    wanted = {"wy", "chunk_fwd", "chunk_dstate"} | ({"intra_safe"} if case[1] else set())
    assert {name.split("_sm90")[0] for name in found} == {f"dplr_{name}" for name in wanted}
    if name == "gdn2":  # its scans are kda's, job for job
        of_kda = {job.key for job in jobs(CASES["kda"], split).values()}
        found = {n: job for n, job in found.items() if job.key not in of_kda}
        assert {job.name for job in found.values()} == {
            f"dplr_{n}_sm90_kernel" for n in ("wy", "intra_safe")
        }
    if name in ("dplr", "iplr"):  # one scan forward; kda's two, of o and of states, are compiled
        found = {job.name: job for job in found.values()}
    check(found, STACK.get(name, 0), WY_STACK.get(name, 0))


def check(found: dict[str, Job], safe_stack: int = 0, wy_stack: int = 0) -> None:
    for job in found.values():
        got = job.compile()
        assert got.shared <= ARCHS["sm_90"].shared
        stack = safe_stack if "safe" in job.name else wy_stack if "wy" in job.name else 0
        assert got.stack <= stack, f"{job.name}: {got.stack} bytes spilled"
        assert got.instructions["wgmma"] > 0
        inverts = job.name.startswith(("dplr_wy", "dplr_intra_safe"))
        assert got.instructions["mma.sync"] == inverts * INVERSE
        assert got.instructions["atomic"] == 0
        assert not arrives_early(got.ptx)
        text = disassemble(got.asm["cubin"])
        assert not overwritten(text)
        assert not unwritten(text)


def test_layout_of_forward() -> None:
    """Terms stay where they are, but offsets become dense; of one token a row, rows of some heads
    are as far apart as in the batch."""
    from slipstream.kernels.linear.sm90.dplr import backend

    given = terms(CASES["kda_narrow"], torch.device("cpu"))
    assert given.cu_seqlens is not None
    apart = torch.stack([given.cu_seqlens] * 2, 1)[:, 0]
    found = backend.Sm90Dplr().forward_layout(given._replace(cu_seqlens=apart))
    assert found.q.data_ptr() == given.q.data_ptr()
    assert found.cu_seqlens is not None and found.cu_seqlens.is_contiguous()
    of_heads = [torch.empty(B, T, 4, 64)[:, :, 1:3] for B, T in ((2, 3), (2, 1), (1, 1))]
    assert [backend._token_stride(x) for x in of_heads] == [256, 256, 128]
