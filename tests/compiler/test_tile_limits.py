"""Every row of every table of tiles against compiler/arch.py, for all architectures."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from slipstream.compiler import arch as checked
from slipstream.compiler.aot import Job
from slipstream.compiler.arch import ARCHS, MATRICES, Arch, instruction
from slipstream.kernels.attention.triton import tiles as softmax_tiles
from slipstream.kernels.linear.triton.delta import plan as triton_delta_tiles
from slipstream.kernels.linear.triton.dplr import tiles as triton_dplr_tiles
from slipstream.kernels.linear.triton.scalar_decay import tiles
from slipstream.kernels.linear.triton.vector_decay import tiles as vector_decay_tiles
from slipstream.kernels.norm import triton_launch as norm_tiles
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from tests.support import tile_limits as needs
from tests.support.tile_limits import TileRequirements, violation

compiles = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, and its compiler"
)
slow = pytest.mark.slow
every_arch = pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda x: x.name)
WIDTHS = (16, 64, 100, 128, 256)


def expect_runs(arch: Arch, *requirements: TileRequirements) -> None:
    assert [violation(x, arch) for x in requirements] == [None] * len(requirements)


@every_arch
@pytest.mark.parametrize("size", [2, 4])
def test_every_tile_of_linear_attention_can_run(arch: Arch, size: int) -> None:
    family = tiles.family(arch.capability, arch.name == "gfx942")
    for K in WIDTHS:
        for V in WIDTHS:
            scans = [tiles.choose(family, K, V, size)]
            channel = vector_decay_tiles.choose(family, K, size)
            scans.append(vector_decay_tiles.choose_chunk_tile(family, K, V, size, channel.C))
            rows = [*scans, (channel, K), triton_delta_tiles.choose(family, K, V, size)]
            rows += [triton_dplr_tiles.choose(family, K, V, size, free) for free in (False, True)]
            for tile, width in rows:
                expect_runs(arch, *needs.of_linear(tile, width, size))


@every_arch
@pytest.mark.parametrize("size", [2, 4])
def test_every_tile_of_attention_can_run(arch: Arch, size: int) -> None:
    family = softmax_tiles.family(arch.capability, arch.name == "gfx942")
    widest = softmax_tiles.MAX_HEAD_DIM_FP32 if family in softmax_tiles.MIN_HEAD_DIM else 256
    for D in WIDTHS:
        for DV in (x for x in WIDTHS if size == 2 or max(D, x) <= widest):
            for busy in (False, True):
                row, BD, BV = softmax_tiles.choose(family, D, DV, size, busy)
                for kernel, tile in vars(row).items():
                    if tile is not None:
                        expect_runs(arch, needs.of_attention(kernel, tile, BD, BV, size))
    if size == 2 and (tile := softmax_tiles.LATENT.get(family)) is not None:
        expect_runs(arch, needs.of_attention("latent", tile, 512, 512, size))


@every_arch
def test_every_tile_of_the_norms_can_run(arch: Arch) -> None:
    for D in (8, 1000, 4096, 8192, 16384, 32768, 65536):
        for size in (2, 4):
            for backward, sums in ((False, True), (True, True), (True, False)):
                tile = norm_tiles.choose(D, size, arch.shared, backward, False, sums)
                if arch.warp == 64:  # as launches do
                    tile = replace(tile, warps=min(tile.warps, 16))
                expect_runs(arch, needs.of_norm(tile, size))


def test_tma_and_stage_limits() -> None:
    box = TileRequirements(2, 4, 2, boxes=((64, 512),))
    assert "5 dimensions of up to 256" in (violation(box, ARCHS["sm_90"]) or "")
    assert "multiples of 16 bytes" in (
        violation(replace(box, boxes=((64, 4),)), ARCHS["sm_90"]) or ""
    )
    assert violation(replace(box, boxes=((64, 64),)), ARCHS["sm_120"]) is None
    assert "no TMA" in (violation(replace(box, boxes=((64, 64),)), ARCHS["sm_80"]) or "")
    assert "stages: want 1 to 8" in (violation(TileRequirements(2, 4, 9), ARCHS["sm_90"]) or "")
    assert checked.closest_legal(0, lambda x: x, lambda x: "never", {}) is None


def products() -> Iterator[Any]:
    for arch in ARCHS.values():
        for rows, warps in ((64, 4), (32, 4), (64, 2)):
            quick = arch.name == "sm_90"
            yield pytest.param(arch, rows, warps, marks=[] if quick else [slow])


@compiles
@pytest.mark.parametrize(("arch", "rows", "warps"), [*products()])
def test_instruction_is_as_predicted(arch: Arch, rows: int, warps: int) -> None:
    tensors = {"x_ptr": "*bf16", "y_ptr": "*bf16", "o_ptr": "*fp32"}
    constants = {"M": rows, "N": 64}
    job = Job(
        "tests.support.planted_bugs:narrow_kernel", tensors, constants, {}, warps, 2, {}, arch.name
    )
    made = {x for x in MATRICES if job.compile().instructions[x]}
    wanted = instruction(arch, rows, warps)
    assert made == (set() if wanted is None else {wanted})
