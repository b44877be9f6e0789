"""Kernels of a call, found out on a device that is not there, are those the JIT would compile."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import ops
from slipstream.compiler import aot
from slipstream.compiler import trace as tracing
from slipstream.compiler.trace import trace
from slipstream.tools.catalog import SAMPLES, Sample, Shape
from tests.support import wants

pytestmark = wants.compiler


def gated_delta_rule(device: torch.device, T: int = 100, impl: str = "triton") -> Any:
    q, k, v = (torch.empty(2, T, 4, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    g, beta = (torch.empty(2, T, 4, device=device) for _ in range(2))
    return ops.chunk_gated_delta_rule(q, k, v, g, beta, impl=impl)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_trace_finds_what_the_jit_would_compile(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Forward and backward; the same source, hence the same place in Triton's cache."""
    from triton.compiler import ASTSource

    told: dict[str, dict] = {}
    make = aot.job_of

    def note(module: str, name: str, compile: dict, arch: str) -> aot.Job:
        job = make(module, name, compile, arch)
        told.setdefault(job.key, compile)
        return job

    monkeypatch.setattr(aot, "job_of", note)
    jobs = tracing.trace(gated_delta_rule, arch)
    assert {"delta_chunk_fwd_kernel", "delta_dqkg_kernel"} <= {x.name for x in jobs}
    assert [x.key for x in jobs] == list(told)
    assert {x.arch for x in jobs} == {arch}
    for job, compile in zip(jobs, told.values()):
        fn = aot.load(job.kernel)
        want = ASTSource(fn, compile["signature"], compile["constants"], compile["configs"][0])
        assert aot.source_of(job).hash() == want.hash(), job.name


def test_cached_says_whether_a_first_call_would_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    job = aot.Job(
        "tests.support.planted_bugs:planted_kernel",
        {"x_ptr": "*i32"},
        {"WHAT": "x"},
        {},
        1,
        1,
        {},
        "sm_80",
    )
    assert not aot.cached(job)
    job.compile()
    assert aot.cached(job)
    assert not aot.cached(replace(job, warps=2))


# for sm_90, with a Triton whose Gluon is another
portable = pytest.mark.filterwarnings(
    "ignore::slipstream.compiler.compiler_state.KernelDisabledWarning"
)


@portable
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_trace_of_no_sequences(arch: str) -> None:
    """Every chunked operator: how many programs there are divides nothing."""

    def call(device: torch.device, sample: Sample) -> Any:
        return sample.call(sample.inputs(Shape(B=0), device, blank=True))

    chunked = [x for x in SAMPLES if x.op.startswith("chunk_")]
    assert len(chunked) > 15
    for sample in chunked:
        trace(partial(call, sample=sample), arch)


@portable
@pytest.mark.parametrize("H", [1, 2])
def test_trace_copies_strided_state(H: int) -> None:
    def call(device: torch.device) -> Any:
        q, k, v = (torch.empty(1, 64, H, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
        state = [torch.empty(1, n, H, 64, device=device) for n in (64, 1)]
        kv = state[0].transpose(1, 2)
        return ops.chunk_linear_attn(q, k, v, initial_state=(kv, state[1]))

    assert trace(call, "sm_90", backward=False)
