"""Kernels that are there before earlier launches have ended touch no memory until these have."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from slipstream.compiler.aot import Compiled
from slipstream.compiler.arch import ARCHS
from slipstream.compiler.trace import trace
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.kernels.projection_step import op
from slipstream.kernels.projection_step.inputs import NormedInputs
from slipstream.ops import mixer_step, projection_step, rms_norm
from tests.support import projections, wants
from tests.support.mixer_steps import LARGE, job_of
from tests.support.sass import disassemble

pytestmark = wants.triton
_CODE = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(\S+)")
_TOUCHES = ("LDG", "STG", "ATOM", "RED.", "REDG", "LDGSTS", "LD.", "ST.", "UBLKCP", "UTMA")


def projection(rows: int, glu: bool = False, many: bool = False) -> Compiled:
    from slipstream.kernels.projection_step import triton_kernels as launch

    N, K = 4112, 1024
    if many:
        tile = launch.tile_of_many(N, K, 1 + glu, 232_448)
    else:
        tile = launch.tile_of(rows, N, K, 2, 2 * (1 + glu), 232_448)
    names = ("x", "y", "w0", "w1", *([] if rows > 1 else ["norm_weight"]))
    flags = {"ONE": rows == 1, "NORM": rows == 1, "GLU": glu, "PREFETCH": not many}
    return projections.compile_step(tile, dict.fromkeys(names, "*bf16"), PDL=True, **flags)


def of_call(call: Callable[[Callable[..., torch.Tensor]], object], kernel: str) -> Compiled:
    """The kernel of that name that a call launches, of tensors in bfloat16."""

    def run(device: torch.device) -> None:
        call(partial(torch.empty, device=device, dtype=torch.bfloat16))

    (job,) = (x for x in trace(run, "sm_90", backward=False) if x.name == kernel)
    assert job.constants["PDL"]
    return job.compile()


def sums() -> Compiled:
    def call(make: Callable[..., torch.Tensor]) -> None:
        given = make(64, 1024), make(1024, 1024), None, make(64, 1024), make(1024)
        op.run_norm(NormedInputs(*given), NormOptions(1e-5), "triton")

    return of_call(call, "projection_sums_kernel")


def norm() -> Compiled:
    return of_call(lambda make: rms_norm(make(1, 1024), make(1024)), "norm_fwd_kernel")


def mixer(kind: str, V: int = 128) -> Compiled:
    """Of one sequence, whose weights are asked for before anything is read."""
    job = job_of(kind, replace(LARGE, V=V), alone=True)
    assert job.constants["PDL"] and job.constants["PREFETCH"]
    return job.compile()


KERNELS = {
    "projection of a row": (lambda: projection(1), 1),
    "projection of 64 rows": (lambda: projection(64), 1),
    "gated projection of 64 rows": (lambda: projection(64, True), 2),
    "projection with x on the left": (lambda: projection(64, many=True), 0),
    "gated projection with x on the left": (lambda: projection(64, True, True), 0),
    "sums of shares": (sums, 0),
    "norm": (norm, 0),
    "mixer_step": (lambda: mixer("gated_deltanet"), 1),
    "mixer_step, two programs a head": (lambda: mixer("kda", V=256), 1),
}


@pytest.mark.parametrize("name", KERNELS)
def test_no_memory_is_touched_before_earlier_launches_end(name: str) -> None:
    make, prefetches = KERNELS[name]
    code = _CODE.findall(disassemble(make().asm["cubin"]))
    assert [x.split(".")[0] for x in code].count("ACQBULK") == 1
    at = code.index(next(x for x in code if x.startswith("ACQBULK")))
    begins = [i for i, x in enumerate(code) if x.startswith("PREEXIT")]
    assert len(begins) == 1 and begins[0] > at
    before, behind = code[:at], code[at:]
    assert sum(x.startswith("UBLKPF") for x in before) == prefetches
    # a program that ended here would let the next launch read before this one's earlier ones end
    assert not [x for x in before if x.startswith("EXIT")]
    assert not [x for x in before if x.startswith(_TOUCHES)]
    assert len([x for x in behind if x.startswith(_TOUCHES)]) >= 3


def steps(rows: int, device: torch.device) -> None:
    """Calls that a decoding step of that many sequences makes."""
    x, w = (torch.empty(n, 128, device=device, dtype=torch.bfloat16) for n in (rows, 512))
    mixer_step(*(rms_norm(x).view(rows, 1, 1, 128),) * 3, state=x.new_empty(rows, 1, 128, 128))
    projection_step(x, w)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("rows", "prefetches"), [(1, True), (2, False)])
def test_launches_begin_ahead_where_the_gpu_can(arch: str, rows: int, prefetches: bool) -> None:
    jobs = trace(lambda device: steps(rows, device), arch, backward=False)
    named = {job.name: job for job in jobs}
    assert set(named) == {"norm_fwd_kernel", "mixer_step_kernel", "projection_step_kernel"}
    here = arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 90
    for name, job in named.items():
        assert job.options.get("launch_pdl", False) is job.constants["PDL"] is here
        assert job.constants.get("PREFETCH", False) is (here and prefetches and "norm" not in name)


def test_training_norms_wait_for_earlier_launches() -> None:
    (job,) = trace(lambda device: rms_norm(torch.empty(65, 128, device=device)), "sm_90", False)
    assert job.constants["PDL"] is False
