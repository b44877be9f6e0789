"""The kernels with a decay per channel compiled for GPUs that need not be there."""

import pytest
import torch

from slipstream.compiler.aot import Compiled, Job
from slipstream.compiler.arch import ARCHS
from slipstream.kernels.linear.triton.plan import HAVE_TRITON, INTERPRETED
from slipstream.tools.catalog import Shape
from tests.support.linear_compiled import SHAPES, jobs
from tests.support.sass import disassemble
from tests.support.uniform_registers import unwritten

pytestmark = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, and its compiler"
)

OPERATORS = ("chunk_gla", "chunk_rwkv6", "chunk_gsa")
# Of the gradients, which spill in 16 bits, in bytes by PIECES: those by levels a twelfth of the
# loop's instructions.
SPILLS = {1: 704, 2: 1152, 4: 704, 0: 1792}  # 2: rwkv6's
PLAIN = Shape(K=128, V=128)
_COMPILED: dict[str, Compiled] = {}


def check(job: Job, shape: Shape) -> None:
    if job.key not in _COMPILED:
        _COMPILED[job.key] = job.compile()
    got = _COMPILED[job.key]
    exact = job.constants.get("BF16_TERMS", 0) == 3 or shape.dtype == torch.float32
    assert got.shared <= ARCHS[job.arch].shared, f"{job.name}: {got.shared} bytes"
    if job.arch == "sm_90" and got.dots and not exact:
        assert got.instructions["wgmma"]
        assert not got.instructions["mma.sync"]  # what narrow tiles fall back to
        assert not unwritten(disassemble(got.asm["cubin"]))
    if job.arch == "sm_80" and got.dots:
        assert got.instructions["mma.sync"]
    assert not got.instructions["atomic"]
    limit = 16384 if exact else SPILLS.get(job.constants.get("PIECES", -1), 384)
    assert got.stack <= limit, f"{job.name}: {got.stack} bytes spilled"


def test_channel_kernels_compile():
    for job in jobs("chunk_gla", PLAIN, "sm_90", backward=False):
        check(job, PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_channel_kernels_compile_in_every_variant(arch: str, shape: str, operator: str):
    for job in jobs(operator, SHAPES[shape], arch):
        check(job, SHAPES[shape])


@pytest.mark.slow
@pytest.mark.parametrize(("K", "V"), [(30, 60), (100, 256), (1, 1)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_120"])
def test_channel_kernels_compile_for_odd_widths(arch: str, K: int, V: int):
    shape = Shape(K=K, V=V, packed=True, state=True)
    for job in jobs("chunk_rwkv6", shape, arch):
        check(job, shape)


def test_two_programs_of_a_scan_fit_a_multiprocessor():
    """On sm_90 with K = V = 128 in 16 bits."""
    for job in jobs("chunk_gla", PLAIN, "sm_90", backward=False):
        if job.name == "vector_decay_chunk_kernel":
            assert job.compile().shared <= 115_700
