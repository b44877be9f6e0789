"""Every row of every table of tiles against compiler/arch.py, for all architectures; errors name
what would run."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.compiler import arch as checked
from slipstream.compiler.aot import Job
from slipstream.compiler.arch import ARCHS, MATRICES, Arch, expect_fits, instruction, named, of
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


def test_every_row_is_its_own_device() -> None:
    for row in ARCHS.values():
        assert of(row.capability, hip=row.name == "gfx942") is row
        assert row.wgmma == (row.instruction == "wgmma")


def test_unlisted_device_limits() -> None:
    assert of((8, 7)).shared == ARCHS["sm_80"].shared
    assert of((12, 1)).name == "sm_121"
    later = of((13, 0))
    assert (later.name, later.wgmma, later.shared) == ("sm_130", False, ARCHS["sm_86"].shared)
    assert of((6, 0)).shared == ARCHS["sm_75"].shared


def test_errors_name_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"arch: want one of sm_70, .* gfx942, got 'sm_91'"):
        named("sm_91")
    with pytest.raises(
        ValueError,
        match="scan of 128 x 128: needs 120000 bytes of shared memory, sm_86 has 101376; it runs"
        " on sm_80, sm_90, sm_100",
    ):
        expect_fits("scan of 128 x 128", 120000, ARCHS["sm_86"])
    with pytest.raises(ValueError, match=r"3 stages: .* 2 stages need 80000"):
        expect_fits("3 stages", 120000, ARCHS["sm_86"], nearest="2 stages need 80000")
    with pytest.raises(ValueError, match="no architecture has as much"):
        expect_fits("scan", 786432, ARCHS["sm_90"])
    expect_fits("scan", 65536, ARCHS["gfx942"])


def test_units_are_in_the_table_alone() -> None:
    """Code that needs a GPU's number of multiprocessors asks the table, or the device."""
    root = Path(checked.__file__).parents[1]
    units = 114, 132, 264, 528
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in units
    }
    assert found == {"compiler/arch.py"}
