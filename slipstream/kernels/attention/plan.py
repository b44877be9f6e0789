"""Which calls the kernels take, and tiles of the Gluon ones, decided without importing Triton.

Of these a program has two warpgroups of 64 rows; at 256, where registers end, dq has a kernel of
its own, and one warpgroup makes dk and one dv. tests/kernels/test_compiles.py holds rows against
shared memory, registers and the waits that a serialised wgmma would have.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.common.rounded_keys import LARGEST
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.triton import tiles
from slipstream.runtime import backends, guarded_launch
from slipstream.runtime.backends import HAVE_TRITON as HAVE_TRITON
from slipstream.runtime.backends import INTERPRETED as INTERPRETED
from slipstream.runtime.backends import triton_unsupported

# the widest that tiles.py has tiles for, in 16 bits
MAX_HEAD_DIM = 512
# of latents, and of what follows them in a row
MAX_WIDTH, MAX_ROPE_WIDTH = 512, 64


def unsupported_reason(qkv: tuple[Tensor, Tensor, Tensor]) -> str | None:
    """Why the kernels can't take this call, or None if they can."""
    q, k, v = qkv
    if reason := triton_unsupported(q, "q"):
        return reason
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return "q, k and v differ in dtype"
    return _too_wide(q, v)


def cache_unsupported_reason(qkv: tuple[Tensor, Tensor, Tensor]) -> str | None:
    """The same of what reads a cache, which may be in 8 bits."""
    q, k, v = qkv
    if k.dtype not in LARGEST or k.dtype != v.dtype:
        return unsupported_reason(qkv)
    if reason := triton_unsupported(q, "q"):
        return reason
    narrow = k.dtype == torch.float8_e4m3fn and q.is_cuda and not torch.version.hip
    if narrow and torch.cuda.get_device_capability(q.device) < (8, 9):
        return "float8 wants sm_89 or newer"
    return _too_wide(q, v)


def _too_wide(q: Tensor, v: Tensor) -> str | None:
    widest = max(q.shape[-1], v.shape[-1])
    if widest > MAX_HEAD_DIM:
        return f"head widths may be at most {MAX_HEAD_DIM}"
    if q.is_cuda:
        of = tiles.family(torch.cuda.get_device_capability(q.device), bool(torch.version.hip))
        if widest > (limit := tiles.max_head_dim(of, q.dtype.itemsize)):
            dtype = str(q.dtype).removeprefix("torch.")
            return f"{dtype} heads wider than {limit} want more shared memory than {of} has"
    return None


def kind(inputs: AttentionInputs, options: AttentionOptions, impl: str = "triton") -> KernelKey:
    """The calls that share a verdict on the kernels."""
    q, flags = (
        inputs.q,
        [name for name in AttentionInputs._fields[3:] if getattr(inputs, name) is not None],
    )
    windows = options.left >= 0 and "left", options.right >= 0 and "right"
    cap = options.softcap != 0 and "softcap"
    return (f"attention.{impl}", q.dtype, q.shape[-1], inputs.v.shape[-1], *windows, cap, *flags)


def kind_of_cache(what: str, q: Tensor, v: Tensor, table: Tensor | None) -> KernelKey:
    """The same of what reads a cache ("decode") or writes it ("append")."""
    pages = table is not None and "pages"
    key = f"attention.{what}", q.dtype, q.shape[-1], v.shape[-1], pages
    return key if v.dtype == q.dtype else (*key, v.dtype)


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
# heads of q and k of one width and of v of another, and those whose values go in two launches of
# half their columns, so that 128 queries fit: the backward is the portable one
FORWARD = {(192, 128): Tile(128, (2, 2)), (512, 512): Tile(64, (1, 1))}
# of a head whose sums of 128 rows registers hold
MAX_COLUMNS = 256
# bytes of keys and values at work at a time: they are to stay in the L2 cache
SECTION_BYTES = 32 << 20
# SECTION_BYTES of the forward: half of the cache is far from a multiprocessor
FWD_SECTION_BYTES = 8 << 20


def sm90_unsupported_reason(inputs: AttentionInputs, options: AttentionOptions) -> str | None:
    """Why the kernels can't take this call, or None if they can."""
    q, k, v = inputs[:3]
    if reason := backends.sm90_unsupported(q):
        return reason
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, and q is {q.dtype}"
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return "q, k and v differ in dtype"
    D, DV = q.shape[-1], v.shape[-1]
    if (D not in TILES or D != DV) and (D, DV) not in FORWARD:
        widths = ", ".join([*map(str, TILES), *(f"{x} and {y}" for x, y in FORWARD)])
        return f"heads of q and v are to be of one width of {widths}"
    for name in ("g", "slopes"):
        if getattr(inputs, name) is not None:
            return f"it takes no {name}"
    if options.scale <= 0:
        return "the scale is to be positive"
    return guarded_launch.known_failure(lambda: kind(inputs, options, "sm90"), q.device)
