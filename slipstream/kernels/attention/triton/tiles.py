"""Tables of the kernels' tiles, by architecture, head width and dtype, and what launches share.

BM queries and BN keys a tile. tests/compiler/test_tile_limits.py holds each row against
compiler/arch.py, tests/kernels/test_compiles.py rows against the spills they may have.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.runtime import backends, launch_cache
from slipstream.runtime.backends import device_of as device_of
from slipstream.runtime.backends import fp32_dot_precision as fp32_dot_precision


class Tile(NamedTuple):
    BM: int
    BN: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    forward: Tile
    dq: Tile
    dkv: Tile  # of dk alone, where dv has a launch of its own
    decode: Tile
    dv: Tile | None = None


# Narrower dots beside others are miscompiled on sm_90 by Triton 3.6's ptxas 12.8.
MIN_HEAD_DIM = {"sm_90": 64, "sm_100": 64}

# (family, bytes an element, widest head) -> Tiles
TILES = {
    ("sm_70", 2, 64): Tiles(*[Tile(32, 32, 4, 1)] * 4),
    ("sm_70", 2, 128): Tiles(*[Tile(16, 32, 4, 1)] * 4),
    ("sm_70", 2, 256): Tiles(*[Tile(16, 16, 4, 1)] * 4),
    ("sm_70", 4, 64): Tiles(*[Tile(32, 32, 4, 1)] * 4),
    ("sm_70", 4, 128): Tiles(*[Tile(16, 16, 4, 1)] * 4),
    ("sm_70", 4, 256): Tiles(*[Tile(16, 16, 4, 1)] * 4),
    ("sm_80", 2, 64): Tiles(
        Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(16, 64, 4, 3)
    ),
    ("sm_80", 2, 128): Tiles(
        Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(32, 128, 8, 2), Tile(16, 64, 4, 3)
    ),
    ("sm_80", 2, 256): Tiles(
        Tile(64, 64, 8, 1), Tile(64, 32, 8, 1), Tile(32, 64, 8, 1), Tile(16, 32, 4, 2)
    ),
    ("sm_86", 2, 256): Tiles(
        Tile(64, 64, 8, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 32, 4, 2)
    ),
    ("gfx942", 2, 64): Tiles(*[Tile(64, 64, 4, 1)] * 4),
    ("gfx942", 2, 128): Tiles(
        Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1), Tile(32, 32, 4, 1)
    ),
    ("gfx942", 2, 256): Tiles(*[Tile(32, 32, 4, 1)] * 4),
    ("gfx942", 4, 64): Tiles(*[Tile(32, 32, 4, 1)] * 4),
    ("gfx942", 4, 128): Tiles(*[Tile(32, 32, 4, 1)] * 4),
    ("gfx942", 4, 256): Tiles(*[Tile(16, 16, 4, 1)] * 4),
    ("sm_80", 4, 64): Tiles(
        Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), Tile(16, 32, 4, 2)
    ),
    ("sm_80", 4, 128): Tiles(
        Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 32, 4, 2)
    ),
    ("sm_80", 4, 256): Tiles(
        Tile(32, 32, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 4, 1)
    ),
    # the fastest of a sweep on an H200, 21 November
    ("sm_90", 2, 64): Tiles(
        Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3)
    ),
    ("sm_90", 2, 128): Tiles(
        Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2), Tile(64, 64, 4, 3)
    ),
    ("sm_90", 2, 256): Tiles(
        Tile(128, 64, 8, 2),
        Tile(128, 64, 8, 1),
        Tile(64, 128, 8, 1),
        Tile(64, 64, 4, 2),
        dv=Tile(64, 128, 8, 2),
    ),
    ("sm_100", 2, 256): Tiles(
        Tile(128, 64, 8, 2), Tile(64, 64, 8, 1), Tile(32, 32, 8, 1), Tile(64, 64, 4, 2)
    ),
    ("sm_80", 2, 512): Tiles(
        Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 16, 4, 3)
    ),
    ("sm_86", 2, 512): Tiles(*[Tile(16, 16, 4, 1)] * 4),
    # forward and gradients with a gate, where no other kernels do: wgmma's tiles would spill
    ("sm_90", 2, 512): Tiles(
        Tile(32, 64, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 16, 4, 4)
    ),
    ("sm_90", 4, 64): Tiles(
        Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)
    ),
    ("sm_90", 4, 128): Tiles(
        Tile(64, 64, 4, 2), Tile(64, 64, 8, 1), Tile(64, 64, 8, 1), Tile(64, 64, 8, 2)
    ),
    # with larger ones dq and dkv want more tensor memory than there is
    ("sm_100", 4, 128): Tiles(
        Tile(64, 64, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(64, 64, 8, 2)
    ),
    ("interpreter", 2, 64): Tiles(*[Tile(16, 32, 4, 1)] * 4),
    ("interpreter", 4, 64): Tiles(*[Tile(32, 16, 4, 1)] * 4),
}
# Rows for calls with a gate, slopes, a softcap or a window to the left, where they differ: with the
# tiles above, forward and dq would spill in their loops.
BIASED_TILES = {
    ("sm_90", 2, 64): Tiles(
        Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(64, 64, 4, 3)
    ),
    ("sm_90", 2, 128): Tiles(
        Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(64, 64, 4, 3)
    ),
}


class WideTile(NamedTuple):
    """Of wide.py. BM queries and BN keys a tile of weights, BK columns of q and k a step; BC
    columns of a gradient a program, BS keys or queries a step; stages and warps of both."""

    BM: int
    BN: int
    BK: int
    BC: int
    BS: int
    stages: tuple[int, int]
    warps: tuple[int, int]


# (family, bytes an element) -> WideTile
WIDE = {
    ("sm_80", 2): WideTile(128, 128, 32, 128, 32, (3, 3), (8, 8)),
    ("sm_86", 2): WideTile(64, 64, 32, 128, 32, (3, 3), (4, 4)),
    ("sm_90", 2): WideTile(128, 128, 64, 256, 64, (4, 3), (8, 8)),
    ("interpreter", 2): WideTile(16, 32, 64, 256, 16, (1, 1), (4, 4)),
    ("interpreter", 4): WideTile(32, 16, 64, 256, 16, (1, 1), (4, 4)),
}
# bytes of weights and their gradients that wide.py works on at a time
WORKSPACE_BYTES = 512 << 20
# of decode_latent.py, for latents up to 512 wide and 64 beside them, in 16 bits
LATENT = {
    "sm_80": Tile(16, 32, 4, 2),
    "sm_86": Tile(16, 32, 4, 2),
    "sm_90": Tile(64, 64, 8, 2),
    "interpreter": Tile(16, 16, 4, 1),
}
# (family, widest head) -> tile of decode_words.py, where it is not that of decode: few rows, since
# a row without a query costs as much as one with, and warps enough to share a row of values.
ROUNDED = {
    ("sm_90", 64): Tile(16, 32, 1, 3),
    ("sm_90", 128): Tile(16, 64, 2, 3),
    ("sm_90", 256): Tile(16, 64, 4, 3),
}
# Families that use another's rows where they have none of their own.
FALLBACK_FAMILY = {"sm_75": "sm_70", "sm_86": "sm_80", "sm_100": "sm_90"}


def family(capability: tuple[int, int], hip: bool = False) -> str:
    """The row of the tables for a device: sm_86 stands for all with 99 KB of shared memory."""
    if hip:
        return "gfx942"
    if capability[0] < 8:
        return "sm_75" if capability == (7, 5) else "sm_70"
    if capability == (8, 0):
        return "sm_80"
    if capability[0] == 9:
        return "sm_90"
    return "sm_100" if capability[0] in (10, 11) else "sm_86"


def rounded(family: str, widest: int, decode: Tile) -> Tile:
    """The tile of decode_words.py for heads of at most 64, 128 or 256."""
    row = FALLBACK_FAMILY.get(family, family)
    return ROUNDED.get((row, max(64, widest)), decode)


def choose(
    family: str, D: int, DV: int, bytes_each: int, has_bias: bool = False
) -> tuple[Tiles, int, int]:
    """The tiles, BD and BV for heads of widths D and DV."""
    narrowest = MIN_HEAD_DIM.get(family, 16)
    BD, BV = (max(narrowest, 16, 1 << (width - 1).bit_length()) for width in (D, DV))
    widest = 64 if family == "interpreter" else max(64, BD, BV)
    row = (family, bytes_each, widest)
    if row not in TILES:
        row = (FALLBACK_FAMILY[family], bytes_each, widest)
    return BIASED_TILES.get(row, TILES[row]) if has_bias else TILES[row], BD, BV


def max_head_dim(family: str, bytes_each: int) -> int:
    """The widest heads that the tables have tiles for."""
    rows = family, FALLBACK_FAMILY.get(family)
    return max(width for of, each, width in TILES if of in rows and each == bytes_each)


LOG2E = math.log2(math.e)
# arguments of kernels: strides of q, k and v [B, T, H, D]
STRIDES = tuple(f"stride_{name}{dim}" for name in "qkv" for dim in "bth")


@launch_cache.cache
def tiles_for(
    device: torch.device, D: int, DV: int, bytes_each: int, has_bias: bool = False
) -> tuple[Tiles, int, int]:
    has_bias &= not backends.INTERPRETED
    return choose(family_of(device), D, DV, bytes_each, has_bias)


@launch_cache.cache
def family_of(device: torch.device) -> str:
    if backends.INTERPRETED:
        return "interpreter"
    return family(torch.cuda.get_device_capability(device), hip=bool(torch.version.hip))


def multiprocessors(device: torch.device) -> int:
    return backends.sm_count(device.index if device.type == "cuda" else -1)


def unit_and_strides(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, list[int]]:
    """Strides in units of as many elements as divide them all, at most the 16 bytes of a load."""
    strides = [s for x in (q, k, v) for s in x.stride()[:3]]
    unit = _unit(16 // q.element_size(), *strides)
    return unit, [s // unit for s in strides]


@launch_cache.by_sizes
def _unit(width: int, *strides: int) -> int:
    return math.gcd(width, *strides)


def positive(q: Tensor, options: AttentionOptions) -> tuple[Tensor, AttentionOptions, int]:
    """q and a scale above 0 with the same product, and the sign that went from one to the other."""
    scale = options.scale
    sign = (scale > 0) - (scale < 0)
    return q if sign == 1 else q * sign, options._replace(scale=abs(scale) or 1.0), sign


def to_kernel_layout(
    inputs: AttentionInputs, options: AttentionOptions
) -> tuple[AttentionInputs, AttentionOptions, int]:
    """As the kernels index them, with a positive scale; the sign is taken from q."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in inputs[:3])
    q, options, sign = positive(q, options)
    slopes = inputs.slopes
    optional = (
        None if x is None else x.contiguous() for x in (inputs.sinks, inputs.cu_q, inputs.cu_k)
    )
    sinks, cu_q, cu_k = optional
    inputs = AttentionInputs(
        q,
        k,
        v,
        inputs.g,
        sinks,
        None if slopes is None else slopes.float().contiguous(),
        cu_q,
        cu_k,
        None if inputs.lengths is None else inputs.lengths.contiguous(),
        inputs.seed,
    )
    return inputs, options, sign


def factor_and_cap(options: AttentionOptions) -> tuple[float, float]:
    """As scores.py wants them, in base 2."""
    if options.softcap == 0:
        return LOG2E * options.scale, 0.0
    return 2 * LOG2E * options.scale / options.softcap, LOG2E * options.softcap


def bound(side: int) -> int:
    """A side of the window: beyond every position, and no overflow."""
    return min(max(side, 0), 1 << 30)


def common_args(inputs: AttentionInputs, options: AttentionOptions) -> dict[str, Any]:
    """Arguments that the kernels of forward and backward take, also on sm_90."""
    factor, cap = factor_and_cap(options)
    return {
        "cu_q_ptr": inputs.cu_q,
        "cu_k_ptr": inputs.cu_k,
        "lengths_ptr": inputs.lengths,
        "factor": factor,
        "cap": cap,
        "left": bound(options.left),
        "right": bound(options.right),
    }


def sinks_gradient(sinks: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """The gradient of sinks [H], of launch_delta's base and delta [B, H, T]."""
    p = (LOG2E * sinks.float()[:, None] - base).exp2()
    return -(p * delta).sum((0, 2)).to(sinks.dtype)
