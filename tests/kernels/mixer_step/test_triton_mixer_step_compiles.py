"""The kernel of mixer_step compiled for GPUs that need not be there: registers, spills, loads."""

import re
from dataclasses import replace

import pytest
import torch

from slipstream.compiler.arch import ARCHS
from tests.support import wants
from tests.support.mixer_steps import KINDS, LARGE, Sizes, job_of

pytestmark = wants.triton


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("PER_CHANNEL", [False, True])
@pytest.mark.sample(which=lambda arch, PER_CHANNEL: arch == "sm_90" and not PER_CHANNEL)
def test_step_compiles(arch: str, PER_CHANNEL: bool) -> None:
    got = job_of("kda" if PER_CHANNEL else "gated_deltanet", LARGE, arch).compile()
    assert got.stack <= 96, f"{got.stack} bytes spilled"
    assert got.shared <= ARCHS[arch].shared // 2
    # 128 numbers of the state a thread, and a few others
    assert got.ptx.count("ld.global.v4") == 32
    assert got.ptx.count("ld.global") <= 68, "vectors are loaded once for each row of the state"


@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16], ids=str)
def test_v_first_states_share_sums_among_few_lanes(pool: torch.dtype) -> None:
    """Loads of 16 bytes, and no sum of each register over a warp, which takes 5 x 64 shuffles."""
    size = replace(LARGE, pool_dtype=pool)
    got = job_of("gated_deltanet", size, state_v_first=True).compile()
    assert got.stack <= 96, f"{got.stack} bytes spilled"
    wide = re.findall(r"ld\.global\S*\.v4", got.ptx)
    assert len(wide) == (32 if pool == torch.float32 else 16)
    assert got.ptx.count("shfl.sync") <= 120


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "size", [Sizes(), Sizes(T=3), Sizes(T=4, pending=2)], ids=["1", "3", "4-2"]
)
@pytest.mark.sample(which=lambda kind, size: size.T == 1 or kind == next(iter(KINDS)))
def test_every_launch_compiles(kind: str, size: Sizes) -> None:
    """Whatever is None, or not."""
    assert job_of(kind, replace(size, K=16, V=16)).compile().stack == 0


@pytest.mark.parametrize(("kind", "v_first"), [("gated_deltanet", False), ("retention", True)])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.sample(which=lambda kind, v_first, width: width == 128 and v_first)
def test_drafts_keep_states_in_registers(kind: str, v_first: bool, width: int) -> None:
    """Loads of 8 or 16 bytes, and no number of a state in shared memory; as many programs as fit
    by their registers."""
    size = Sizes(T=8, pending=4, H=2, HV=4, K=width, V=width, dtype=torch.bfloat16)
    job = job_of(kind, size, state_v_first=v_first)
    assert job.name == "mixer_drafts_sm90_kernel"
    got = job.compile()
    assert got.stack <= 200, f"{got.stack} bytes spilled"
    assert got.instructions["mma.sync"] == 3 * (width // 16 * 2) * 3
    wide = re.findall(rf"ld\.global\S*\.v{4 if v_first else 2}\.b32", got.ptx)
    numbers = width * width // (32 * width // 16)  # of a state in a thread
    assert len(wide) >= numbers // (4 if v_first else 2)
    assert got.shared <= 20 << 10
