"""Tiles and segments of the delta rule's kernels, by shapes, dtypes and device alone.

C tokens a chunk, in all of them. A scan has BV columns of V a program and all of K, BK = the next
power of two; the gradients' kernel BK channels of K, and takes V by BV at a time.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.plan import INTERPRETED
from slipstream.kernels.linear.segments import Segments, delta_tokens, split_into_segments
from slipstream.kernels.linear.triton.common.tma import tma_descriptors
from slipstream.kernels.linear.triton.scalar_decay import tiles
from slipstream.kernels.linear.triton.scalar_decay.tiles import family_of
from slipstream.runtime import backends, launch_cache


@dataclass(frozen=True)
class KernelTile:
    B: int  # BV of a scan, BK of solve and grads
    warps: int
    stages: int


@dataclass(frozen=True)
class DeltaTile:
    C: int
    solve: KernelTile
    fwd: KernelTile
    dstate: KernelTile
    grads: KernelTile
    tma: bool = False  # rows by tensor descriptors, where they are aligned


def _delta_tile(C: int, solve: tuple, fwd: tuple, dstate: tuple, grads: tuple) -> DeltaTile:
    return DeltaTile(
        C, KernelTile(*solve), KernelTile(*fwd), KernelTile(*dstate), KernelTile(*grads)
    )


# (family, bytes an element, next power of two of K, at least 64) -> C, and B, warps and stages of
# solve, fwd, dstate and grads. What is larger than this on sm_80 makes ptxas put every register on
# the stack. float32 with K = 256 does so everywhere: right, but slow. On sm_90 its chunks of 64
# don't fit, and narrower dots are only right there with 2 warps, which don't use wgmma.
# Rows of sm_90 are the fastest of sweeps on an H200 (22 November); with K = 128 in 16 bits
# those for more programs than multiprocessors, of which two stages let two share one.
TILES = {
    ("sm_70", 2, 64): _delta_tile(32, (32, 4, 1), (32, 4, 1), (32, 4, 1), (32, 4, 1)),
    ("sm_80", 2, 64): _delta_tile(32, (64, 4, 2), (64, 4, 2), (64, 4, 2), (32, 4, 2)),
    ("sm_80", 2, 128): _delta_tile(32, (64, 4, 2), (32, 4, 1), (32, 4, 2), (32, 4, 2)),
    ("sm_80", 2, 256): _delta_tile(32, (64, 4, 1), (16, 4, 1), (16, 4, 1), (32, 4, 1)),
    ("sm_80", 4, 64): _delta_tile(16, (32, 4, 1), (32, 4, 1), (32, 4, 1), (16, 4, 1)),
    ("sm_80", 4, 128): _delta_tile(16, (32, 4, 1), (16, 4, 1), (16, 4, 1), (16, 4, 1)),
    ("sm_80", 4, 256): _delta_tile(16, (32, 4, 1), (16, 4, 1), (16, 4, 1), (16, 4, 1)),
    ("sm_90", 2, 64): _delta_tile(64, (64, 4, 1), (64, 4, 3), (64, 4, 3), (64, 4, 2)),
    ("sm_90", 2, 128): _delta_tile(64, (128, 4, 1), (64, 4, 2), (64, 4, 2), (64, 4, 2)),
    ("sm_90", 2, 256): _delta_tile(64, (128, 4, 1), (64, 8, 2), (64, 8, 2), (64, 4, 2)),
    ("sm_90", 4, 64): _delta_tile(64, (64, 4, 1), (64, 8, 1), (64, 8, 1), (64, 4, 1)),
    ("sm_90", 4, 256): _delta_tile(32, (32, 2, 1), (16, 2, 1), (16, 2, 1), (32, 2, 1)),
    ("interpreter", 4, 64): _delta_tile(32, (16, 4, 1), (16, 4, 1), (16, 4, 1), (16, 4, 1)),
}
# Rows of these use others': (family, bytes) -> (family, bytes).
_SAME = {("sm_70", 4): ("sm_80", 4), ("interpreter", 2): ("interpreter", 4)}


def choose(family: str, K: int, V: int, bytes_each: int) -> tuple[DeltaTile, int]:
    """The tile, no wider than K and V need, and BK of the scans."""
    narrowest = tiles.NARROWEST.get(family, 16)
    BK = max(narrowest, tiles.power_of_two(K))
    base = tiles.ROWS.get(family, family), bytes_each
    base = _SAME.get(base, base)
    width = max(64, BK)
    while (base[0], base[1], width) not in TILES:
        width //= 2
    tile = TILES[base[0], base[1], width]
    if narrowest > tile.C:
        narrowest = 16
    width_v = max(narrowest, tiles.power_of_two(V))
    cut = {name: _segment_cost(getattr(tile, name), width_v) for name in ("fwd", "dstate")}
    cut |= {name: _segment_cost(getattr(tile, name), BK) for name in ("solve", "grads")}
    tma = base[0] == "sm_90" and tile.C >= 64
    if tma and family in tiles.UNPIPELINED:
        cut = {name: replace(kernel_tile, stages=1) for name, kernel_tile in cut.items()}
    return DeltaTile(tile.C, **cut, tma=tma), BK


def _segment_cost(kernel_tile: KernelTile, width: int) -> KernelTile:
    """A tile of 64 rows has work for 4 warps of sm_90's tensor cores."""
    warps = (
        kernel_tile.warps
        if width >= kernel_tile.B
        else max(4, kernel_tile.warps * width // kernel_tile.B)
    )
    return KernelTile(min(kernel_tile.B, width), min(kernel_tile.warps, warps), kernel_tile.stages)


# Widths of K up to which products of the scans take pairs of bf16: without decay, 200 tokens that
# share 17 dimensions of K give o an error of 7.4e-3 in plain bf16, and 3.8e-3 in pairs.
MIN_SPLIT_BF16_WIDTH = 32
# Width of K up to which rows of p come in as many stages as those of k.
MAX_M_OFFSET_WIDTH = 128


@launch_cache.cache
def _tile(device: torch.device, K: int, V: int, bytes_each: int) -> tuple[DeltaTile, int]:
    return choose("interpreter" if INTERPRETED else family_of(device), K, V, bytes_each)


def tile_of(terms: LinearInputs) -> tuple[DeltaTile, int]:
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    return _tile(terms.q.device, K, V, terms.q.element_size())


def choose_segments(terms: LinearInputs) -> Segments | None:
    """Decided by shapes and device."""
    HV, V = terms.v.shape[2:]
    tile, _ = tile_of(terms)
    return segments_for_programs(terms, -(-V // tile.fwd.B) * HV * terms.sequences, tile.C)


def segments_for_programs(terms: LinearInputs, programs: int, C: int) -> Segments | None:
    """Segments for kernels that have this number of programs."""
    fits = can_pass_states(terms)
    tokens = delta_tokens(programs, terms.v.shape[1], C) if fits else None
    return split_into_segments(terms, tokens)


def can_pass_states(terms: LinearInputs) -> bool:
    """Whether M and a state fit shared memory."""
    tile, BK = tile_of(terms)
    return BK <= 128 and _shared(terms.q.device) >= 4 * BK * (BK + tile.fwd.B)


def _shared(device: torch.device) -> int:
    return backends.shared_memory_bytes(device.index or 0) if device.type == "cuda" else 1 << 17


def uses_split_bf16(terms: LinearInputs) -> bool:
    return terms.q.dtype == torch.bfloat16 and terms.q.shape[-1] <= MIN_SPLIT_BF16_WIDTH


def launch_options(terms: LinearInputs, kernel_tile: KernelTile) -> dict[str, Any]:
    # beside k there is no room for as many stages of p
    wide = terms.p is not None and terms.q.shape[-1] > MAX_M_OFFSET_WIDTH
    return {
        "FP32": terms.q.dtype == torch.float32,
        "PRECISION": backends.fp32_dot_precision(),
        "num_warps": kernel_tile.warps,
        "num_stages": 1 if wide else kernel_tile.stages,
    }


def scan_options(terms: LinearInputs, kernel_tile: KernelTile) -> dict[str, Any]:
    """launch_options of a scan; those of wide heads spill under Triton 3.9 on sm_90."""
    spills = terms.q.shape[-1] > 128 and family_of(terms.q.device) == "sm_90"
    spills = spills and tile_of(terms)[0].tma
    return launch_options(terms, kernel_tile) | (backends.FEWER_REGISTERS if spills else {})


def tma_descriptor(
    terms: LinearInputs, tensors: list[Tensor | None], widths: list[int]
) -> tuple[list[Any], bool]:
    """The tensors [B, T, heads, ...] as the kernels take them, and whether by descriptors."""
    tile, _ = tile_of(terms)
    if tile.tma and terms.cu_seqlens is None:
        descriptors = tma_descriptors(tensors, widths, tile.C)
        if descriptors is not None:
            return descriptors, True
    return tensors, False


def state_descriptor(states: Tensor, BV: int, BK: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(
        states, list(states.shape), list(states.stride()), [1, 1, int(BV), int(BK)]
    )
