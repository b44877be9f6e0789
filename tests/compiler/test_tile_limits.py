"""Every row of every table of tiles against compiler/arch.py, for all architectures; tiles that
cannot run are refused before anything is compiled, with the nearest that can."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from slipstream.compiler import tile_limits as checked
from slipstream.compiler.aot import Job
from slipstream.compiler.arch import ARCHS, MATRICES, Arch
from slipstream.compiler.tile_limits import TileRequirements, instruction, violation
from slipstream.kernels.attention import tile_limits as softmax
from slipstream.kernels.attention.triton import tiles as softmax_tiles
from slipstream.kernels.linear import tile_limits as linear
from slipstream.kernels.linear.triton.delta import tiles as triton_delta_tiles
from slipstream.kernels.linear.triton.dplr import tiles as triton_dplr_tiles
from slipstream.kernels.linear.triton.scalar_decay import tiles
from slipstream.kernels.linear.triton.vector_decay import tiles as vector_decay_tiles
from slipstream.kernels.norm import tile_limits as norm
from slipstream.kernels.norm.triton import tiles as norm_tiles
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED

compiles = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, and its compiler"
)
slow = pytest.mark.slow
every_arch = pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda x: x.name)
WIDTHS = (16, 64, 100, 128, 256)


@every_arch
@pytest.mark.parametrize("size", [2, 4])
def test_every_tile_of_linear_attention_can_run(arch: Arch, size: int) -> None:
    family = tiles.family(arch.capability)
    for K in WIDTHS:
        for V in WIDTHS:
            walks = [tiles.choose(family, K, V, size, gated) for gated in (False, True)]
            channel = vector_decay_tiles.choose(family, K, size)
            walks.append(vector_decay_tiles.choose_chunk_tile(family, K, V, size, channel.C))
            for tile, BD in walks:
                linear.check(tile, BD, size, arch)
            linear.check(channel, K, size, arch)
            linear.check(*triton_delta_tiles.choose(family, K, V, size), size, arch)
            for free in (False, True):
                linear.check(*triton_dplr_tiles.choose(family, K, V, size, free), size, arch)


@every_arch
@pytest.mark.parametrize("size", [2, 4])
def test_every_tile_of_attention_can_run(arch: Arch, size: int) -> None:
    family = softmax_tiles.family(arch.capability, arch.name == "gfx942")
    widest = softmax_tiles.MAX_HEAD_DIM_FP32 if family in softmax_tiles.MIN_HEAD_DIM else 256
    for D in WIDTHS:
        for DV in (x for x in WIDTHS if size == 2 or max(D, x) <= widest):
            for busy in (False, True):
                softmax.check(*softmax_tiles.choose(family, D, DV, size, busy), size, arch)
    if size == 2 and (tile := softmax_tiles.LATENT.get(family)) is not None:
        softmax.check_one("latent", tile, 512, 512, size, arch)


@every_arch
def test_every_tile_of_the_norms_can_run(arch: Arch) -> None:
    for D in (8, 1000, 4096, 8192, 16384, 32768, 65536):
        for size in (2, 4):
            for backward, sums in ((False, True), (True, True), (True, False)):
                tile = norm_tiles.choose(D, size, arch.shared, backward, False, sums)
                if arch.warp == 64:  # as launches do
                    tile = replace(tile, warps=min(tile.warps, 16))
                norm.check(tile, size, arch)


def test_refused_tile_names_nearest_legal() -> None:
    """What a tuner may try: each of these would end in the compiler, or be wrong."""
    wide = tiles.Tile(64, 256, 8, 4, tma=True)
    with pytest.raises(ValueError, match=r"fwd: sm_86 has no TMA; .* is Tile\(C=64, .* tma=False"):
        linear.check(wide, 128, 2, ARCHS["sm_86"])
    plain = replace(wide, tma=False)
    with pytest.raises(
        ValueError,
        match=r"fwd: needs 147456 bytes of shared memory, sm_86 has 101376; the nearest that works"
        r" is Tile\(C=64, BX=256, warps=8, stages=3, tma=False\)",
    ):
        linear.check(plain, 128, 2, ARCHS["sm_86"])
    tile, BK = triton_delta_tiles.choose("sm_90", 128, 128, 2)
    tile = replace(tile, solve=triton_delta_tiles.KernelTile(64, 6, 1))
    with pytest.raises(ValueError, match="solve: warps: want a power of two up to 32, got 6"):
        linear.check(tile, BK, 2, ARCHS["sm_90"])
    with pytest.raises(
        ValueError, match=r"fwd: a wgmma of 32 columns .* miscompiled; .* is Tile\(C=32, BX=32"
    ):
        linear.check(tiles.Tile(32, 64, 4, 1), 128, 2, ARCHS["sm_90"])
    with pytest.raises(ValueError, match=r"forward: a product of 96 x 64 x 64: want powers"):
        softmax.check_one("forward", softmax_tiles.Tile(96, 64, 4, 2), 64, 64, 2, ARCHS["sm_80"])
    with pytest.raises(
        ValueError, match=r"forward: 1024 sums a thread .* 255 .*BM=32, BN=64, warps=2"
    ):
        softmax.check_one("forward", softmax_tiles.Tile(256, 64, 2, 1), 256, 256, 2, ARCHS["sm_80"])
    with pytest.raises(ValueError, match=r"norm: warps: .* to 16, got 32; .* BD=32768, warps=16"):
        norm.check(norm_tiles.Tile(1, 32768, 32, 0, 1), 2, ARCHS["gfx942"])


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


def test_every_architecture_says_what_its_matrix_instruction_takes() -> None:
    for arch in ARCHS.values():
        assert (arch.matrix is None) == (arch.instruction is None) == (not arch.dots)
        assert arch.wgmma == (arch.matrix is MATRICES["wgmma"])
        assert arch.fp8 is None or arch.fp8 in arch.dots
        assert arch.tma == (arch.name in ("sm_90", "sm_100", "sm_120"))
    assert instruction(ARCHS["sm_90"], 64, 4) == "wgmma"
    assert instruction(ARCHS["sm_90"], 64, 2) == instruction(ARCHS["sm_90"], 32, 4) == "mma.sync"
    assert instruction(ARCHS["sm_70"], 64, 4) is None


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
