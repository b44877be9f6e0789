"""Which calls the Gluon kernels take, and their tiles by the width of a head, without Triton.

A program has two warpgroups of 64 rows; at 256, where registers end, dq has a kernel of its own,
and one warpgroup makes dk and one dv.
tests/kernels/test_compiles.py holds rows against shared memory, registers and the waits that a
serialised wgmma would have.
"""

from typing import NamedTuple

import torch

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.triton.plan import kind
from slipstream.runtime import backends, guarded_launch


class Tile(NamedTuple):
    """B: keys (of dk and dv: queries) a step. buffers: of each ring. persistent: a program a
    multiprocessor, which takes unit after unit, or a program a unit. rows: of a unit. queries: the
    forward's buffers of these, two where those of the next unit are to be there early.
    """

    B: int
    buffers: tuple[int, int]
    persistent: bool = True
    rows: int = 128
    queries: int = 1


class Tiles(NamedTuple):
    """dq, dkv: where these have kernels of their own; launch.py has the others."""

    forward: Tile
    dq: Tile | None = None
    dkv: Tile | None = None


TILES = {
    64: Tiles(Tile(128, (4, 4), queries=2)),
    128: Tiles(Tile(128, (2, 2))),
    256: Tiles(Tile(64, (2, 2)), dq=Tile(64, (2, 1)), dkv=Tile(64, (2, 2), rows=64)),
}
# the forward of heads of q and k of one width and of v of another; the backward is the portable one
MIXED_WIDTHS = {(192, 128): Tile(128, (2, 2))}
# of a thread of the warpgroups that compute, of one that loads, and of each of the 12 warps before
# they are handed out
REGISTERS = 240, 24, 168
# bytes of keys and values at work at a time: they are to stay in the L2 cache
SECTION_BYTES = 32 << 20
# SECTION_BYTES of the forward: half of the cache is far from a multiprocessor
FWD_SECTION_BYTES = 8 << 20


def unsupported_reason(inputs: AttentionInputs, options: AttentionOptions) -> str | None:
    """Why the kernels can't take this call, or None if they can."""
    q, k, v = inputs[:3]
    if reason := backends.sm90_unsupported(q):
        return reason
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, and q is {q.dtype}"
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return "q, k and v differ in dtype"
    D, DV = q.shape[-1], v.shape[-1]
    if (D not in TILES) if D == DV else (D, DV) not in MIXED_WIDTHS:
        widths = ", ".join([*map(str, TILES), *(f"{x} and {y}" for x, y in MIXED_WIDTHS)])
        return f"heads of q and v are to be of one width of {widths}"
    for name in ("g", "slopes"):
        if getattr(inputs, name) is not None:
            return f"it takes no {name}"
    if options.scale <= 0:
        return "the scale is to be positive"
    return guarded_launch.known_failure(lambda: kind(inputs, options, "sm90"), q.device)
