"""The linear family's Triton kernels compiled for GPUs that need not be there.

Which kernels and tiles a call takes is found out by tracing it (compiler/trace.py), so whatever the
launches choose is what is compiled: shared memory, tensor cores, spills.
"""

from dataclasses import replace

import pytest
import torch

from slipstream.compiler.aot import Compiled, Job
from slipstream.compiler.arch import ARCHS
from slipstream.compiler.compile_worker import Outcome
from slipstream.compiler.support_matrix import judge
from slipstream.kernels.linear.triton.plan import HAVE_TRITON, INTERPRETED
from slipstream.tools.catalog import Shape
from tests.support.linear_compiled import SHAPES, jobs

pytestmark = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, and its compiler"
)

ADDITIVE = ("chunk_linear_attn", "chunk_simple_gla")
DELTA = ("chunk_delta_rule", "chunk_gated_delta_rule", "chunk_comba")
WIDER = ("chunk_kda", "chunk_dplr_delta_rule", "chunk_iplr_delta_rule", "chunk_gla", "chunk_gsa")
PLAIN = Shape(K=128, V=128)
NARROW = Shape(B=1, T=170, H=2, K=256, V=30, packed=True, state=True)


_COMPILED: dict[str, Compiled] = {}


def check_room(job: Job) -> Compiled:
    if job.key not in _COMPILED:  # operators share kernels
        _COMPILED[job.key] = job.compile()
    got = _COMPILED[job.key]
    assert got.shared <= ARCHS[job.arch].shared, judge(job, Outcome("ok", compiled=got))
    return got


def check(job: Job, shape: Shape) -> None:
    got = check_room(job)
    exact, wide = shape.dtype == torch.float32, max(shape.K, shape.V) > 128
    if job.arch == "sm_90" and got.dots and not (exact and wide):
        assert got.instructions["wgmma"] > 0, job
        assert got.instructions["mma.sync"] == 0, job  # what narrow tiles fall back to
    if job.arch == "sm_80" and got.dots:
        assert got.instructions["mma.sync"] > 0, job
    assert got.instructions["atomic"] == 0
    # Some of it in the loops: scans of 128 channels want more registers than there are, and
    # float32 takes three products for one.
    limit = 16384 if exact and wide else 4096 if exact else 1280
    assert got.stack <= limit, f"{job.name}: {got.stack} bytes spilled"


@pytest.mark.parametrize("operator", ["chunk_simple_gla", "chunk_gated_delta_rule"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_forward_compiles(arch: str, operator: str) -> None:
    for job in jobs(operator, PLAIN, arch, backward=False):
        check(job, PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("operator", [*ADDITIVE, *DELTA])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_every_kernel_compiles(arch: str, shape: str, operator: str) -> None:
    for job in jobs(operator, SHAPES[shape], arch):
        check(job, SHAPES[shape])


def test_dplr_fits_wide_keys() -> None:
    """They load a tile more than kda's, whose row of the table they take."""
    for job in jobs("chunk_dplr_delta_rule", NARROW, "sm_90"):
        if job.name == "dplr_chunk_fwd_kernel":
            check_room(job)


@pytest.mark.parametrize("operator", ["chunk_simple_gla", "chunk_gla", "chunk_kda"])
def test_wide_float32_needs_shared_memory(operator: str) -> None:
    shape = Shape(B=1, T=170, H=2, K=130, V=64, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="more shared memory than sm_75 has"):
        jobs(operator, shape, "sm_75")
    assert jobs(operator, shape, "sm_86") and jobs(operator, replace(shape, K=128), "sm_75")


@pytest.mark.slow
@pytest.mark.parametrize("operator", [*ADDITIVE, *DELTA, *WIDER])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_of_narrow_values_have_room(arch: str, dtype: torch.dtype, operator: str) -> None:
    for job in jobs(operator, replace(NARROW, dtype=dtype), arch):
        check_room(job)


@pytest.mark.slow
@pytest.mark.parametrize(("K", "V"), [(30, 60), (100, 256), (1, 1)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
def test_odd_widths_compile(arch: str, K: int, V: int) -> None:
    shape = Shape(K=K, V=V, packed=True, state=True)
    for job in jobs("chunk_simple_gla", shape, arch):
        check(job, shape)
