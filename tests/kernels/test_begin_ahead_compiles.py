"""Kernels that are there before earlier launches have ended touch no memory until these have."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.compiler.aot import Compiled, Job
from slipstream.compiler.arch import ARCHS
from slipstream.compiler.trace import trace
from slipstream.ops import mixer_step, projection_step, rms_norm
from tests.support import projections, wants
from tests.support.mixer_steps import LARGE, job_of
from tests.support.sass import disassemble

pytestmark = wants.triton
_CODE = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(\S+)")
_TOUCHES = ("LDG", "STG", "ATOM", "RED.", "REDG", "LDGSTS", "LD.", "ST.", "UBLKCP", "UTMA")


def begun_ahead(job: Job) -> Compiled:
    assert job.constants["PDL"]
    return job.compile()


def projection(rows: int, *N: int, **options: Any) -> Compiled:
    return begun_ahead(projections.job_of(rows, *N, **options))


def norm() -> Compiled:
    def call(device: torch.device) -> None:
        rms_norm(x := torch.empty(1, 1024, device=device, dtype=torch.bfloat16), x[0])

    return begun_ahead(*trace(call, "sm_90", backward=False))


def mixer(kind: str, V: int = 128) -> Compiled:
    """Of one sequence, whose weights are asked for before anything is read."""
    return begun_ahead(job_of(kind, replace(LARGE, V=V), alone=True))


KERNELS = {
    "projection of a row": (lambda: projection(1, 4112, norm_eps=1e-5), 1),
    "gated projection of a row": (lambda: projection(1, 4112, 4112, activation="swiglu"), 2),
    "projection of 16 rows": (lambda: projection(16, 4112), 0),
    "projection with x on the left": (lambda: projection(64, 4112), 0),
    "gated projection with x on the left": (
        lambda: projection(64, 4112, 4112, activation="swiglu"),
        0,
    ),
    "shares of a projection": (lambda: begun_ahead(projections.norm_jobs()[0]), 0),
    "sums of shares": (lambda: begun_ahead(projections.norm_jobs()[1]), 0),
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
