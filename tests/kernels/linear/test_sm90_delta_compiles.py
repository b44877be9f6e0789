"""The linear family's Gluon kernels compiled for sm_90, which need not be there.

The launches say which kernels a call takes (compiler/trace.py). Gluon can't be interpreted, so what
they compute is checked on a GPU alone (tests/gpu/test_delta_sm90.py).
"""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slipstream.compiler.aot import Compiled, Job
from slipstream.compiler.arch import ARCHS
from slipstream.compiler.known_bugs import version
from slipstream.kernels.linear.delta import Checkpoints, WYFactors
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import CHUNK, TILE_V, Segments
from slipstream.kernels.linear.sm90 import plan
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from tests.support.linear_compiled import INVERSE
from tests.support.sass import arrives_early, disassemble, most_spilled
from tests.support.triton_release import RELEASE

pytestmark = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, and its compiler"
)

# 16-bit dtype, K, V, gate, initial state, packed
CASES = {
    "plain": (torch.bfloat16, 128, 128, False, False, False),
    "gated": (torch.bfloat16, 128, 128, True, True, True),
    "narrow": (torch.float16, 64, 64, True, False, False),
}
SPLIT = CASES["gated"]
# Bytes of the stack a thread, and words of it in a loop over chunks, by a part of the name.
SPILLS = {
    "chunk_bwd": (24, 8),  # whose gradients take more than their part of registers
    "state_passing": (64, 0),  # 4 warps take 14.6 us where 8, which spill nothing, take 18.8
    "dqkg": (16, 1),  # 30.6 us where the order that spills nothing takes 33.8
}
# ptxas 13.4.59, which Triton 3.9 brings, spills where 12.8.93 and 13.0.88 do not.
SPILLS_OF_3_9 = {
    "chunk_bwd": (216, 109),
    "state_passing": (64, 0),
    "dqkg": (112, 27),
    "chunk_fwd": (40, 17),
}


MAKES = [
    "solve", "o", "states", "wide", "wide_states", "back", "grads", "shared", "ends", "ends_back",
    "meet", "meet_back", "parts", "parts_split", "wide_parts",
    "ends_alone", "ends_every", "ends_every_back", "ends_scanned", "meet_back_alone", "one_scan",
    "shared_scan", "split_scan", "shared_split_scan",
]  # fmt: skip
# Of those gated, whose flags are each in two others; narrow and ungated kinds are in two makes.
FURTHER = (
    "parts", "wide_states", "ends_every", "one_scan", "shared_scan", "split_scan",
)  # fmt: skip
SAMPLE = {
    "plain": ("solve", "o", "back"),
    "gated": tuple(x for x in MAKES if x not in FURTHER),
    "narrow": ("solve", "one_scan"),
}


def terms(case: tuple, device: torch.device | str) -> LinearInputs:
    dtype, K, V, gate, state, packed = case
    B, T, H, HV = 1 if packed else 2, 192, 1, 2
    make = {"device": device, "dtype": dtype}
    N = 2 if packed else B
    return LinearInputs(
        torch.ones(B, T, H, K, **make),
        torch.ones(B, T, H, K, **make),
        torch.ones(B, T, HV, V, **make),
        g=torch.zeros(B, T, HV, device=device) if gate else None,
        beta=torch.ones(B, T, HV, device=device),
        initial_state=torch.ones(N, HV, K, V, device=device) if state else None,
        cu_seqlens=torch.ones(N + 1, dtype=torch.int32, device=device) if packed else None,
    )


def jobs(case: tuple, make: str) -> list[Job]:
    from slipstream.compiler.trace import trace
    from slipstream.kernels.linear.sm90.delta import segment_launch
    from slipstream.kernels.linear.sm90.delta.backend import Sm90Delta
    from slipstream.kernels.linear.sm90.delta.bwd_schedule import make_schedule

    class Delta(Sm90Delta):
        def _use_2tile(self, terms: LinearInputs) -> bool:
            return make.startswith("wide")

    def call(device: torch.device) -> None:
        given = terms(case, device)
        assert plan.unsupported_reason(given) is None
        like = given.v
        (B, T, HV, V), K = like.shape, given.q.shape[-1]
        gates, chunks = 1 + (given.g is not None), 8
        r = like.new_empty(B, T, HV, CHUNK)
        rows = r.new_empty(chunks, HV, gates, CHUNK, dtype=torch.float32)
        out, states = torch.empty_like(like), like.new_empty(chunks, HV, V, K)
        wy = WYFactors(r, rows, None if given.g is None else rows.new_empty(chunks, HV, 4))
        end = rows.new_empty(given.state_shape)
        at = Segments(64, 8)
        ends = {"s_in": given.initial_state, "segments": at if case == SPLIT else None}
        cut = make_schedule(given, 2, 1 if "split_scan" in make else 0)
        marks = like.new_empty(cut.checkpoints, HV, V, K)
        checkpoints = Checkpoints(2, marks)
        delta = Delta()
        if make == "solve":
            delta.solve_tril(given)
        elif make == "o":
            delta.chunk_fwd(given, wy, 0.1, out, s_out=end, **ends)
        elif make in ("parts", "parts_split"):
            ends["segments"] = at if make == "parts_split" else None
            delta.chunk_fwd(given, wy, 0.1, out, s_out=end, **ends, checkpoints=checkpoints)
        elif make == "states":
            delta.chunk_fwd(given, wy, 0.1, out, states=states, **ends)
        elif make.startswith("wide"):
            kept: dict[str, Any] = {"states": states} if "states" in make else {"s_out": end}
            kept["checkpoints"] = checkpoints if make == "wide_parts" else None
            delta.chunk_fwd(given, wy, 0.1, out, s_in=given.initial_state, **kept)
        elif make in ("grads", "shared"):
            wide = like.new_empty(B, T, HV if make == "grads" else given.q.shape[2], K)
            each = rows.new_empty(B, T, HV)
            made = {"q": wide, "k": wide, "beta": each, "g": each}
            delta.chunk_dqkg(given, out, wy, out, out, states, states, 0.1, made)
        elif make.endswith("_scan"):
            wide = like.new_empty(B, T, given.q.shape[2] if "shared" in make else HV, K)
            each = rows.new_empty(B, T, HV)
            made = {"q": wide, "k": wide, "v": out, "beta": each, "g": each}
            both: dict[str, Any] = {"s_in": given.initial_state, "s_out": given.initial_state}
            if "split_scan" in make:
                both["s_in"] = rows.new_empty(cut.segments.count, HV, K, V)
            delta.chunk_bwd(given, out, wy, 0.1, marks, made, cut, **both)
        elif "ends" in make or "meet" in make:
            start = given.initial_state
            made, far = rows.new_empty(8, HV, K, V + K), rows.new_empty(8, HV, dtype=torch.int32)
            E, m = made.split([V, K], -1)
            m = m.contiguous() if "alone" in make else m
            if make == "ends":
                segment_launch.segment_transition(given, wy, start, at)
            elif make == "ends_scanned":
                segment_launch.states_before(given, wy, at, end)
            elif make == "ends_alone":
                segment_launch.segment_transition(given, wy, None, at, alone=True)
            elif make == "ends_every":
                segment_launch.segment_transition(given, wy, None, at, every=True)
            elif make == "ends_every_back":
                segment_launch.segment_transition_bwd(given, out, wy, 0.1, None, at, every=True)
            elif make == "ends_back":
                segment_launch.segment_transition_bwd(given, out, wy, 0.1, start, at)
            else:
                reverse = "back" in make
                segment_launch.state_passing(given, E, m, far, start, at, reverse=reverse)
        else:
            delta.chunk_dstate(given, out, wy, 0.1, out, states, s_out=end, **ends)

    # but for what sets counts to zero
    return trace(call, "sm_90", backward=False)


def check(job: Job) -> tuple[Compiled, str]:
    """What the job compiles to, and its disassembly if it is one scan back or spills."""
    got = job.compile()
    assert got.shared <= ARCHS["sm_90"].shared
    one_scan = "chunk_bwd" in job.name
    spills = SPILLS_OF_3_9 if version(RELEASE)[:2] == (3, 9) else SPILLS
    most, most_words = next((x for name, x in spills.items() if name in job.name), (0, 0))
    assert got.stack <= most, f"{job.name}: {got.stack} bytes spilled"
    text = disassemble(got.asm["cubin"]) if one_scan or got.stack else ""
    words = most_spilled(text) if text else 0
    assert words <= most_words, f"{job.name}: {words} words of the stack in a loop over chunks"
    assert got.instructions["wgmma"] > 0
    assert got.instructions["mma.sync"] == ("solve" in job.name) * INVERSE
    assert not arrives_early(got.ptx)
    assert got.instructions["atomic"] == one_scan  # a program takes a slot, and leaves it
    assert ("st.release.gpu" in got.ptx) >= one_scan
    return got, text


@pytest.mark.parametrize(
    ("make", "case"),
    [
        pytest.param(make, case, id=f"{make}-{name}", marks=marks)
        for make in MAKES
        for name, case in CASES.items()
        for marks in [pytest.mark.slow if make not in SAMPLE[name] else ()]
    ],
)
def test_delta_kernel_compiles(make: str, case: tuple) -> None:
    if make.startswith("wide") and case[2] % (2 * TILE_V):
        pytest.skip("V is one tile")
    (job,) = jobs(case, make)
    got, text = check(job)
    assert "meet" in make or got.instructions["tma"] >= (2 if make == "solve" else 3)
    if make in ("solve", "grads", "shared") or "meet" in make:
        return
    # no part of a program waits at the barrier of all of them while it works
    partitions = re.findall(r"bar\.sync\s+(\d+), (\d+);", got.ptx)
    scan = {"256"} if make.endswith("_scan") and case[2] == 128 else set()
    assert {threads for _, threads in partitions} == {"128"} | scan
    if make.endswith("_scan"):  # products are not waited for one by one
        assert text.count("WARPGROUP.ARRIVE") < text.count("HGMMA") // 3


@pytest.mark.parametrize("reverse", [False, True], ids=["", "back"])
def test_state_passing_across_ranks_compiles(reverse: bool) -> None:
    """With M beside E, and of some segments not written."""
    from slipstream.compiler.trace import trace
    from slipstream.kernels.linear.context_in_order import LocalSegments
    from slipstream.kernels.linear.sm90.delta.segment_launch import state_passing

    class Sends(LocalSegments):
        """Which wants what sequences end with."""

        @property
        def sends(self) -> bool:
            return True

    def call(device: torch.device) -> None:
        given = terms(SPLIT, device)
        HV, (K, V) = given.v.shape[2], SPLIT[1:3]
        made = torch.ones(8, HV, K, V + K, device=device)
        far = torch.ones(8, HV, dtype=torch.int32, device=device)
        (E, M), state = made.split([V, K], -1), given.initial_state
        more = far, state, Segments(64, 8), Sends(64)
        state_passing(given, E, M, *more, reverse=reverse)

    (job,) = trace(call, "sm_90", backward=False)
    got = job.compile()
    assert got.stack <= 64 and got.shared <= ARCHS["sm_90"].shared


def test_refuses_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    given = terms(CASES["gated"], "cpu")
    assert "sm_90" in str(plan.unsupported_reason(given))
    monkeypatch.setattr(plan, "sm90_unsupported", lambda x: None)
    assert plan.unsupported_reason(given) is None
    wide = F.pad(given.q, (0, 8))
    assert "one of (64, 128)" in str(plan.unsupported_reason(given._replace(q=wide, k=wide)))
    for width in (96, 192, 320):
        v = torch.zeros(*given.v.shape[:3], width, dtype=given.v.dtype)
        assert "V of (64, 128, 256)" in str(plan.unsupported_reason(given._replace(v=v)))
    assert "float16" in str(plan.unsupported_reason(given._replace(q=given.q.float())))
    assert "takes no p" in str(plan.unsupported_reason(given._replace(p=given.k)))
    columns = given._replace(gv=torch.zeros(*given.v.shape))
    assert "takes no gv" in str(plan.unsupported_reason(columns))
    channel = given._replace(g=torch.zeros(*given.v.shape))
    assert plan.unsupported_reason(channel) is None
    wide = F.pad(given.v, (0, 64))
    assert "K and V have to be" in str(plan.unsupported_reason(channel._replace(v=wide)))
