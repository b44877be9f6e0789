"""Sizes at which a call is planned another way: what is chosen at the last one and at the next."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.compiler.arch import ARCHS, expect_fits
from slipstream.kernels.attention import context, latent
from slipstream.kernels.attention.triton import decode_launch
from slipstream.kernels.linear.modes import wide_heads
from slipstream.kernels.linear.triton.delta import plan as delta_plan
from slipstream.kernels.linear.triton.delta.plan import KernelTile
from slipstream.kernels.linear.triton.dplr import tiles as dplr_tiles
from slipstream.kernels.linear.triton.scalar_decay import tiles as scalar_tiles
from slipstream.kernels.matmul import config
from slipstream.kernels.matmul.config import row_by_row
from slipstream.kernels.norm import triton_launch as norm_tiles
from slipstream.kernels.primitives import norm_options
from slipstream.kernels.projection_step import triton_kernels as projection
from slipstream.kernels.selective_scan import op as selective
from slipstream.kernels.selective_scan import sm90_launch as scan_launch

H200, BF16 = ARCHS["sm_90"], torch.bfloat16
TILE: Any = SimpleNamespace(fwd=SimpleNamespace(B=32), warps=4, stages=3, tma=True)
PROBLEM = config.Problem(BF16, BF16, "ieee")


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def heads_at_once(rows: int) -> int:
    """Returns how many of 4 heads of keys one step takes, of `rows` tokens on one rank."""
    inputs = SimpleNamespace(q=meta(1, rows, 4, 8), k=meta(1, rows, 4, 8))
    share = SimpleNamespace(lengths=(rows,), segment_tokens=None, rank=0)
    first = context._groups(inputs, share)[0]
    return first.keys.stop


def latents(q: int, width: int, scale: float = 1.0) -> bool:
    return "wide" in (
        latent.unsupported_reason((meta(1, 1, 2, q), meta(4, q), width, scale, False)) or ""
    )


def delta_terms(K: int, p: bool = False) -> Any:
    return SimpleNamespace(q=meta(1, 1, 1, K), p=p or None)


def passes_states(shared: int) -> bool:
    """Of heads of 64 channels, and states in blocks of 32 columns."""
    with (
        mock.patch.object(delta_plan, "_shared", return_value=shared),
        mock.patch.object(delta_plan, "tile_of", return_value=(TILE, 64)),
    ):
        return delta_plan.can_pass_states(delta_terms(64))


def scan_has_few_registers(K: int) -> bool:
    with (
        mock.patch.object(delta_plan, "family_of", return_value="sm_90"),
        mock.patch.object(delta_plan, "tile_of", return_value=(TILE, K)),
        mock.patch.object(latent.backends, "FEWER_REGISTERS", {"few": True}),
    ):
        return "few" in delta_plan.scan_options(delta_terms(K), TILE)


def scan_warps(sequences: int) -> int:
    """Of tiles of 2 warps, of which a GPU of 4 multiprocessors wants 8 warps each, and of 1."""
    tiles: Any = [(SimpleNamespace(width=4, warps=n), wanted) for n, wanted in ((2, 8), (1, 0))]
    with (
        mock.patch.object(scan_launch, "_fitting", lambda tile, inputs: tile),
        mock.patch.object(scan_launch.arguments, "channel_blocks", return_value=1),
        mock.patch.object(scan_launch.backends, "sm_count", return_value=4),
    ):
        return scan_launch._tile(tiles, SimpleNamespace(u=meta(1, 1, 4)), sequences).warps


def norm_row(D: int, **options: bool) -> int:
    return norm_tiles.choose(D, 2, 1 << 20, **options).warps


# a decision by a size, the last size before it changes and the next; what is decided for each
CASES: dict[str, tuple[Callable[[Any], Any], tuple[Any, Any], tuple[Any, Any]]] = {
    "matmul shares long rows": (
        lambda K: config.uses_split_k(H200, 64, 128, K), (1023, 1024), (False, True)),
    "matmul shares few tiles": (
        lambda n: config.uses_split_k(H200, 64, 128 * n, 4096),
        (H200.units // 2, H200.units // 2 + 1), (True, False)),
    "matmul's wide tiles fill the GPU": (
        lambda n: config.choose(PROBLEM, H200, 128, 256 * n, 4096, True).block_n,
        (H200.units - 1, H200.units), (128, 256)),
    "matmul's narrow tiles": (
        lambda N: config.choose(PROBLEM, H200, 128, N, 4096, True).block_n, (64, 65), (64, 128)),
    "matmul of few rows takes small tiles": (
        lambda M: config.choose(PROBLEM, H200, M, 64 * 66 * 2, 4096, False).block_n,
        (64, 65), (64, 128)),
    "matmul's narrowest tile of TMA": (
        lambda n: config._tma_objection(config.MatmulConfig(
            config.TMA_ROWS, n, config.TMA_BYTES // 2, 8, 4, kernel="tma"), PROBLEM, H200) is None,
        (32, 64), (False, True)),
    "TMA reads no row again and again": (
        lambda stride: row_by_row(torch.empty(64, dtype=BF16).as_strided((4, 8), (stride, 1))),
        (0, 8), (False, True)),
    "delta's products of two halves": (
        lambda K: delta_plan.uses_split_bf16(delta_terms(K)),
        (delta_plan.MIN_SPLIT_BF16_WIDTH, delta_plan.MIN_SPLIT_BF16_WIDTH + 1), (True, False)),
    "delta's stages beside p": (
        lambda K: delta_plan.launch_options(delta_terms(K, p=True), TILE)["num_stages"],
        (delta_plan.MAX_M_OFFSET_WIDTH, delta_plan.MAX_M_OFFSET_WIDTH + 1), (3, 1)),
    "delta's states from program to program": (
        passes_states, (4 * 64 * 96 - 1, 4 * 64 * 96), (False, True)),
    "registers of delta's scans": (scan_has_few_registers, (128, 129), (False, True)),
    "scans of narrow rows": (
        lambda D: scalar_tiles.choose("sm_90", 64, D, 2)[0].warps, (7, 8), (8, 4)),
    "norms of short rows keep no statistics": (
        lambda D: norm_options.NormOptions(1e-6, l2=True).stats_shape(meta(3, D), True),
        (norm_options.RECOMPUTED, norm_options.RECOMPUTED + 1), (None, (1, 3))),
    **{f"rows of a norm of {x.widest}": (norm_row_of, (x.widest, x.widest + 1), (x.warps, y.warps))
       for norm_row_of in [lambda D: norm_row(D, backward=False)]
       for x, y in zip(norm_tiles.FORWARD[1:3], [norm_tiles.FORWARD[2], norm_tiles.FORWARD[4]])},
    "gated rows of a norm": (
        lambda D: norm_row(D, backward=True, heavy=True),
        (8192, 8193), (norm_tiles.BACKWARD[2].warps, norm_tiles.SPLIT.warps)),
    "queries of a decoding step": (
        lambda T: decode_launch.is_supported(
            SimpleNamespace(q=meta(1, T, 4, 8), k=meta(1, 8, 4, 8), cu_q=None, g=None)
        ),
        (decode_launch.MAX_DECODE_ROWS, decode_launch.MAX_DECODE_ROWS + 1), (True, False)),
    "heads of an attention that are sent at a time": (
        heads_at_once, (context.MIN_GROUP_ROWS - 1, context.MIN_GROUP_ROWS), (2, 1)),
    "heads that are cut": (
        lambda K: wide_heads._groups(K, 256)[0], (256, 257), (1, 2)),
    "latents": (
        lambda K: latents(K + 8, K), (latent.MAX_WIDTH, latent.MAX_WIDTH + 1), (False, True)),
    "channels beside latents": (
        lambda n: latents(64 + n, 64),
        (latent.MAX_ROPE_WIDTH, latent.MAX_ROPE_WIDTH + 1), (False, True)),
    "states of a selective scan in registers": (
        lambda N: "registers" in (selective._sm90_unsupported(
            SimpleNamespace(A=meta(4, N), u=meta(1, 2, 4))) or ""),
        (selective.MAX_N, selective.MAX_N + 1), (False, True)),
    "warps of a selective scan": (
        scan_warps, (8 * 4 // 2 - 1, 8 * 4 // 2), (1, 2)),
    "capabilities below Ampere's": (
        lambda x: scalar_tiles.family((x, 6)), (7, 8), ("sm_70", "sm_86")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_plan_changes_at_its_bound(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent.backends, "triton_unsupported", lambda *_: None)
    monkeypatch.setattr(latent.backends, "INTERPRETED", True)
    for missing in ("sm90_unsupported", "_wider", "_failure"):
        monkeypatch.setattr(selective, missing, lambda *_: None)
    decide, sizes, want = CASES[name]
    assert tuple(decide(x) for x in sizes) == want


@pytest.mark.parametrize(("capability", "able"), [((8, 9), False), ((9, 0), True)])
def test_launches_begin_ahead_from_sm_90_on(
    capability: tuple[int, int], able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent.backends, "_capability", lambda index: capability)
    assert latent.backends.supports_pdl(torch.device("cuda", 0)) is able


def test_all_shared_memory_may_be_used() -> None:
    for arch in ARCHS.values():
        expect_fits("a tile", arch.shared, arch)
        with pytest.raises(ValueError, match=f"has {arch.shared}; "):
            expect_fits("a tile", arch.shared + 1, arch)
    most = max(x.shared for x in ARCHS.values())
    with pytest.raises(ValueError, match="it runs on "):
        expect_fits("a tile", most, min(ARCHS.values(), key=lambda x: x.shared))


@pytest.mark.parametrize("tiles", [delta_plan, dplr_tiles])
def test_tiles_as_wide_as_values_are_the_tables(tiles: ModuleType) -> None:
    """Of narrower values some have fewer warps."""
    for (family, bytes_each, width), row in tiles.TILES.items():
        for name, tile in vars(row).items():
            if isinstance(tile, KernelTile):
                found, _ = tiles.choose(family, width, tile.B, bytes_each)
                assert getattr(found, name) == tile, (family, width, name)


def test_narrow_values_take_tiles_of_wgmma_rows() -> None:
    """Of chunks of 64 tokens; of shorter ones and elsewhere they may be 16 wide."""
    for family, bytes_each, K, C in (
        ("sm_90", 2, 64, 64), ("sm_90", 4, 64, 64), ("sm_90", 4, 256, 32), ("sm_80", 2, 64, 32),
    ):  # fmt: skip
        tile, _ = delta_plan.choose(family, K, 16, bytes_each)
        assert tile.C == C and tile.fwd.B == tile.dstate.B == (64 if C == 64 else 16), family


@pytest.mark.parametrize("weights", [1, 2])
@pytest.mark.parametrize("K", [16, 64, 4096])
def test_stages_of_many_rows_fit_shared_memory(K: int, weights: int) -> None:
    for arch in (x for x in ARCHS.values() if x.name.startswith("sm_") and x.tma):
        tile = projection.tile_of_many(4096, K, weights, arch.shared)
        stage = tile.BK * 2 * (tile.BM + tile.BN * weights)
        assert tile.stages == min(5, arch.shared // stage)
