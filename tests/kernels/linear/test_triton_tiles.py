"""Shared memory of the linear family's Triton kernels at widths of their own."""

from dataclasses import replace

import pytest
import torch

from slipstream.compiler.aot import Job
from slipstream.compiler.arch import ARCHS
from slipstream.compiler.trace import trace
from slipstream.tools.catalog import Shape, chosen
from tests.support import wants

pytestmark = wants.compiler


def jobs(operator: str, shape: Shape, arch: str, backward: bool = True) -> list[Job]:
    sample, *_ = chosen([operator])  # of those with other gates the first
    return trace(lambda device: sample.call(sample.inputs(shape, device), "triton"), arch, backward)


def test_dplr_fits_wide_keys() -> None:
    """They load a tile more than kda's, whose row of the table they take."""
    shape = Shape(B=1, T=170, H=2, K=256, V=30, packed=True, state=True)
    found = [
        job.compile()
        for job in jobs("chunk_dplr_delta_rule", shape, "sm_90")
        if job.name == "dplr_chunk_fwd_kernel"
    ]
    assert found and all(x.shared <= ARCHS["sm_90"].shared for x in found)


def test_two_programs_of_a_scan_fit_a_multiprocessor() -> None:
    """On sm_90 with K = V = 128 in 16 bits."""
    found = jobs("chunk_gla", Shape(K=128, V=128), "sm_90", backward=False)
    scans = [job.compile() for job in found if job.name == "vector_decay_chunk_kernel"]
    assert scans and all(x.shared <= 115_700 for x in scans)


@pytest.mark.parametrize(("H", "stages"), [(8, {3, 4}), (32, {2, 3})])
def test_packed_scans_of_few_heads_load_further_ahead(H: int, stages: set[int]) -> None:
    """They then have a multiprocessor each; of many heads two share one."""
    found = jobs("chunk_gla", Shape(B=3, T=100, H=H, K=64, V=128, packed=True), "sm_90")
    scans = [job for job in found if job.name == "vector_decay_chunk_kernel"]
    assert {job.stages for job in scans} == stages
    assert all((job.compile().shared > 115_700) == (H == 8) for job in scans)


@pytest.mark.parametrize("operator", ["chunk_simple_gla", "chunk_gla", "chunk_kda"])
def test_wide_float32_needs_shared_memory(operator: str) -> None:
    shape = Shape(B=1, T=170, H=2, K=130, V=64, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="more shared memory than sm_75 has"):
        jobs(operator, shape, "sm_75")
    assert jobs(operator, shape, "sm_86") and jobs(operator, replace(shape, K=128), "sm_75")


@pytest.mark.parametrize("K", [16, 24])
def test_strong_chunks_of_narrow_heads_compile(K: int) -> None:
    """For sm_100 Triton 3.6 fails where scores of a branch go on into one of its own."""
    shape = Shape(K=K, V=K, packed=True, state=True)
    found = jobs("chunk_kda", shape, "sm_100", backward=False)
    weak_and_strong = [job for job in found if job.name == "dplr_wy_kernel"]
    assert len(weak_and_strong) == 2
    assert all(job.compile().shared <= ARCHS["sm_100"].shared for job in weak_and_strong)
