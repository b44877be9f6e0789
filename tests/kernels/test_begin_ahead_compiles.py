"""Kernels that are there before earlier launches have ended touch no memory until these have."""

import re
from typing import Any

import pytest
import torch

from slipstream.compiler.aot import Compiled, compile_kernel
from slipstream.compiler.arch import ARCHS
from slipstream.compiler.trace import trace
from slipstream.ops import mixer_step, projection_step, rms_norm
from slipstream.runtime.backends import HAVE_TRITON
from tests.support.mixer_steps import compile_step
from tests.support.sass import disassemble

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
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
    constants = {"K": K, "ONE": rows == 1, "BM": tile.BM, "BN": tile.BN, "BK": tile.BK}
    constants |= {"NORM": rows == 1, "ZERO_CENTERED": False, "GLU": glu}
    constants |= {"COLUMNS": K, "X_LEFT": tile.x_left, "PDL": True, "PREFETCH": not many}
    scalars = {"M": "i32", **dict.fromkeys(("row_x", "row_y", "row_residual"), "i32:16")}
    kernel = "slipstream.kernels.projection_step.triton_kernels:projection_step_kernel"
    tensors = {f"{name}_ptr": "*bf16" for name in names}
    return compile_kernel(kernel, tensors, constants, scalars, "sm_90", tile.warps, tile.stages)


def sums() -> Compiled:
    tensors = {"partial_ptr": "*fp32", "residual_ptr": "*bf16", "norm_weight_ptr": "*bf16"}
    tensors |= {"h_ptr": "*bf16", "y_ptr": "*bf16"}
    flags = {"N": 1024, "S": 8, "BS": 8, "BN": 1024, "ZERO_CENTERED": False, "PDL": True}
    kernel = "slipstream.kernels.projection_step.triton_kernels:projection_sums_kernel"
    return compile_kernel(
        kernel, tensors, flags, {"M": "i32", "row_residual": "i32:16"}, "sm_90", 8
    )


def norm() -> Compiled:
    flags = {"G": 1, "D": 1024, "BR": 1, "BD": 1024, "CENTRE": False, "L2": False, "LEAN": True}
    flags |= {"ZERO_CENTERED": False, "SILU": True, "GATE_FIRST": False, "ROUND": True}
    tensors = {f"{name}_ptr": "*bf16" for name in ("x", "w", "y")}
    kernel = "slipstream.kernels.norm.triton_kernels:norm_fwd_kernel"
    return compile_kernel(kernel, tensors, {**flags, "PDL": True}, {}, "sm_90", 4, 3)


def mixer(**options: Any) -> Compiled:
    return compile_step(PDL=True, PREFETCH=True, **options)


KERNELS = {
    "projection of a row": (lambda: projection(1), 1),
    "projection of 64 rows": (lambda: projection(64), 1),
    "gated projection of 64 rows": (lambda: projection(64, True), 2),
    "projection with x on the left": (lambda: projection(64, many=True), 0),
    "gated projection with x on the left": (lambda: projection(64, True, True), 0),
    "sums of shares": (sums, 0),
    "norm": (norm, 0),
    "mixer_step": (mixer, 1),
    "mixer_step, two programs a head": (lambda: mixer(V=256, PER_CHANNEL=True), 1),
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
