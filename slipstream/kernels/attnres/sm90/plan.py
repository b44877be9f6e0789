"""Which calls the backward for sm_90 takes, and its tiles. Plain torch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.runtime.backends import sm90_unsupported

_DTYPES = (torch.bfloat16, torch.float16)
# bytes of a multiprocessor, what each program takes beside its own, and the most that one has
SHARED, RESERVED, MAX_SHARED = 228 << 10, 1 << 10, 227 << 10


class Tile(NamedTuple):
    """A row is PIECES of BD channels, of which a thread has VEC one after the other."""

    BD: int
    PIECES: int
    VEC: int
    WARPS: int

    @property
    def a_thread(self) -> int:
        return self.BD * self.PIECES // (32 * self.WARPS)


def tile(L: int, D: int, normed: bool) -> Tile:
    """The fastest of an H100: without an output's norm 0.89 to 0.94 of a copy's speed."""
    if D <= 1024:
        VEC, WARPS = 8, 2
    elif D <= 2048:
        VEC, WARPS = (8, 4) if normed else (4, 8)
    elif D <= 4096:
        VEC, WARPS = 8, 8
    else:
        VEC, WARPS = 4, 8
        if shared_bytes(L, _cut(D, VEC, WARPS), normed) * 2 > SHARED:  # one program
            VEC, WARPS = 8, 4
    return _cut(D, VEC, WARPS)


def _cut(D: int, VEC: int, WARPS: int) -> Tile:
    """One piece where that is a power of 2."""
    BD = VEC * 32 * WARPS
    pieces = -(-D // BD)
    return (
        Tile(BD, pieces, VEC, WARPS) if pieces & (pieces - 1) else Tile(BD * pieces, 1, VEC, WARPS)
    )


def shared_bytes(L: int, tile: Tile, normed: bool) -> int:
    """The shared memory of a program, at most: residuals of 16 bits, two vectors of float32 with an
    output's norm, and a few numbers of each residual."""
    return tile.BD * tile.PIECES * (2 * L + 8 * normed) + 32 * 16 + 1024


def programs(L: int, tile: Tile, normed: bool) -> int:
    """A multiprocessor: as many as have room in shared memory and registers, of which a thread
    takes 64 for 8 channels, 128 for up to 20, and up to 255 for more."""
    warps = 32 if tile.a_thread <= 8 else 16 if tile.a_thread <= 20 else 8
    return max(min(SHARED // (shared_bytes(L, tile, normed) + RESERVED), warps // tile.WARPS), 1)


def unsupported_reason(residuals: Sequence[Tensor], normed: bool) -> str | None:
    """Why this kernel can't take a call, or None if it can."""
    first = residuals[0]
    if reason := sm90_unsupported(first):
        return reason
    if first.dtype not in _DTYPES:
        return f"it takes residuals of 16 bits, not {first.dtype}"
    L, D = len(residuals), first.shape[-1]
    if D % 8:
        return f"it loads 8 channels at a time, and {D} is no multiple"
    chosen = tile(L, D, normed)
    if shared_bytes(L, chosen, normed) > MAX_SHARED:
        return f"{L} residuals of {D} channels have no room in shared memory"
    if normed and D > 4096 and programs(L, chosen, normed) == 1:
        return f"with an output's norm and {L} residuals of {D} channels Triton's is faster"
    return None
