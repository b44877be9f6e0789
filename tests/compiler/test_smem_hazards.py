"""No kernel for sm_90 overwrites a tile that its products still read, or leaves a barrier behind;
one that does is found."""

from typing import Any

import pytest
import torch

from slipstream.compiler.aot import Job
from slipstream.compiler.compile_worker import Worker
from slipstream.compiler.smem_hazards import find_hazard
from slipstream.compiler.trace import PlainTorch, trace
from slipstream.ops import chunk_simple_gla
from slipstream.tools.catalog import Shape, chosen
from tests.support import planted_bugs, wants
from tests.support.ir_patterns import kernel_ir

pytestmark = wants.compiler
WIDE = Shape(K=256, V=256)


def planted_job(both: bool, stages: int) -> Job:
    tensors = {"x_ptr": "*bf16", "y_ptr": "*bf16", "o_ptr": "*fp32", "sums_ptr": "*fp32"}
    return Job(
        f"{planted_bugs.__name__}:ahead_kernel", tensors, {"BOTH": both}, {}, 4, stages, {}, "sm_90"
    )


@pytest.mark.parametrize(("both", "stages", "found"), [(True, 2, 1), (False, 2, 0), (True, 1, 0)])
def test_overwritten_tile_is_found(both: bool, stages: int, found: int) -> None:
    """x, read by registers and the product: it gets one slot, and is loaded a turn ahead."""
    assert len(find_hazard(kernel_ir(planted_job(both, stages), gpu_too=True))) == found


def test_kernel_overwriting_tiles_is_refused() -> None:
    worker = Worker()
    try:
        refused = worker.compile(planted_job(True, 2))
        assert refused.status == "refused" and "a loop overwrites" in refused.reason
        assert worker.compile(planted_job(False, 2)).status == "ok"
    finally:
        worker.close()


@pytest.mark.parametrize("ended", [False, True])
def test_leftover_barrier_is_found(ended: bool) -> None:
    pytest.importorskip("triton.experimental.gluon")
    name = "tests.support.planted_barriers:barrier_kernel"
    job = Job(name, {"o_ptr": "*fp32"}, {"ENDED": ended}, {}, 4, 1, {}, "sm_90")
    worker = Worker()
    try:
        outcome = worker.compile(job)
    finally:
        worker.close()
    assert outcome.status == ("ok" if ended else "refused")
    assert ended or "barrier" in outcome.reason


LOOP = """
%t = ttg.local_alloc : () -> !ttg.memdesc<{slots}x64x64xbf16, #shared, #smem, mutable>
%at = ttg.memdesc_index %t[%c0] : !ttg.memdesc<3x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
{before}
%r = scf.for %i = %c0 to %n step %c1 iter_args(%acc = %zero) -> (f32) {{
  %now = ttg.memdesc_index %t[%i] : !ttg.memdesc<3x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
  %d = ttng.warp_group_dot %x, %now, %acc {{isAsync = true}} : f32
  %w:2 = ttng.warp_group_dot_wait %d, %now {{pendings = {pending} : i32}} : f32
  %c = ttg.async_copy_global_to_local %p, %at : ptr
  scf.yield %w#0 : f32
}}
"""
COPY = "%b = ttg.async_copy_global_to_local %p, %at : ptr\n"


@pytest.mark.parametrize(
    ("slots", "early", "pending", "raced"),
    [
        (1, 1, 0, False),  # waited for
        (1, 1, 1, True),
        (2, 1, 1, False),  # the copy is of the next turn's slot
        (2, 2, 1, True),  # of the turn after it, which is this turn's
        (3, 2, 1, False),
        (3, 2, 2, True),  # the product of the turn before goes on
        (2, 1, 2, True),
    ],
)
def test_slots_turns_and_waits_are_counted(
    slots: int, early: int, pending: int, raced: bool
) -> None:
    text = LOOP.format(slots=slots, before=COPY * early, pending=pending)
    assert bool(find_hazard(text)) == raced


def found(op: str, shape: Shape, impl: str | None) -> dict[str, list[str]]:
    """By kernel, of those that load ahead or have barriers."""
    sample = chosen([op])[0]

    def call(device: torch.device) -> Any:
        return sample.call(sample.inputs(shape, device, blank=True), impl)

    try:
        jobs = trace(call, "sm_90", True)
    except PlainTorch:
        return {}
    except NotImplementedError:  # of an implementation that was asked for by name
        assert impl is not None
        return {}
    jobs = [x for x in jobs if x.stages > 1 or ".sm90." in x.kernel]
    return {x.key: find_hazard(kernel_ir(x, gpu_too=True)) for x in jobs}


@pytest.mark.parametrize("gated", [True, False])
def test_scan_of_states_leaves_no_barrier(gated: bool) -> None:
    """Without gates the barriers of the gates are not allocated."""
    pytest.importorskip("triton.experimental.gluon")
    shape = Shape(B=1, T=8192, H=2, HV=2, K=128, V=128, dtype=torch.bfloat16)

    def call(device: torch.device) -> Any:
        given = chosen(["chunk_simple_gla"])[0].inputs(shape, device, blank=True)
        g = given["g"] if gated else None
        return chunk_simple_gla(given["q"], given["k"], given["v"], g, consistent=True, impl="sm90")

    scans = [x for x in trace(call, "sm_90", True) if "state_scan" in x.kernel]
    assert scans and not any(find_hazard(kernel_ir(x, gpu_too=True)) for x in scans)


@pytest.mark.parametrize("op", ["chunk_dplr_delta_rule", "chunk_simple_gla", "chunk_delta_rule"])
def test_kernels_overwrite_no_tile(op: str) -> None:
    """Those that did: the gradients of K = 256, where a loop has more turns than one."""
    all_of = found(op, WIDE, "triton")
    assert all_of and not any(all_of.values())


RING = """
%b = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared, #smem, mutable>
%0 = ttg.memdesc_index %b[%c0] : !ttg.memdesc<2x1xi64> -> !ttg.memdesc<1xi64>
%1 = ttg.memdesc_index %b[%c1] : !ttg.memdesc<2x1xi64> -> !ttg.memdesc<1xi64>
ttng.init_barrier %0, 1 : !ttg.memdesc<1xi64>
ttng.init_barrier %1, 1 : !ttg.memdesc<1xi64>
"""
ENDS = [
    "ttng.inval_barrier %0 : !ttg.memdesc<1xi64>",
    "ttng.inval_barrier %1 : !ttg.memdesc<1xi64>",
]


@pytest.mark.parametrize(
    ("after", "left"),
    [
        (ENDS, False),
        (ENDS[:1], True),  # the other one
        (["ttg.warp_specialize(%x, %b) attributes {}"], False),
        (["ttg.warp_specialize(%x) attributes {}"], True),  # the first part alone takes it
        ([], True),
    ],
)
def test_every_barrier_of_a_ring_counts(after: list[str], left: bool) -> None:
    assert bool(find_hazard(RING + "\n".join(after))) == left


@pytest.mark.parametrize("op", ["chunk_gated_delta_rule", "chunk_kda"])
def test_kernels_leave_no_barrier_behind(op: str) -> None:
    """Those that did, where their tiles are small."""
    all_of = found(op, Shape(K=64, V=64), None)
    assert any("sm90" in x for x in all_of) and not any(all_of.values())
