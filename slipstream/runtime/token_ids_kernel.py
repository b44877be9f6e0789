"""Kernels that look for wrong indices, and report one to runtime/token_ids.py.

Program i has the ids [i R, (i + 1) R) and writes the first wrong one of them into slot i; the first
word of all says that there is one.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime.launch_cache import cached
from slipstream.runtime.token_ids import NAMES, SLOTS, slots_for

# ids of a tile, eight a thread
BLOCK = 1024


@triton.jit
def report(slots_ptr, slot, first, ids_ptr, size, last, name):
    """The id at `first`, by one program; the five words are token_ids.WORDS."""
    p = slots_ptr + 1 + slot * 5
    tl.store(p, first.to(tl.int64) + 1)
    tl.store(p + 1, tl.load(ids_ptr + first).to(tl.int64))
    tl.store(p + 2, tl.zeros([], tl.int64) + size)
    tl.store(p + 3, tl.zeros([], tl.int64) + last)
    tl.store(p + 4, tl.zeros([], tl.int64) + name)
    tl.store(slots_ptr, tl.full([], 1, tl.int64))


_SIZES = ["N", "R", "W", "size", "more", "step", "last", "ignore_index", "name"]


@triton.jit(do_not_specialize=_SIZES)
def scan_ids_kernel(
    ids_ptr,  # [N], of indices [N / W, W]
    slots_ptr,
    lengths_ptr,  # [N / W]
    rows_ptr,  # [N / W]
    inverse_count_ptr,  # 1 / how many ids are not ignored, or 1; of one program
    N, R, W, size, more, step, last, ignore_index, name,
    KIND: tl.constexpr, HAS_IGNORED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Grid (N / R), R a multiple of B. By KIND, ids are to be from 0 to size; indices below size,
    negative ones counting as none; offsets from 0 to size, without falling. Without slots_ptr none
    is looked for."""
    begin = tl.program_id(0).to(tl.int64) * R
    end = tl.minimum(begin + R, N)
    b_first = tl.zeros([B], tl.int64) + end
    b_count = tl.zeros([B], tl.int32)
    for o in range(begin, end, B):
        o_n = o + tl.arange(0, B)
        live = o_n < end
        b_id = tl.load(ids_ptr + o_n, mask=live, other=0)
        if KIND == "ids":
            if HAS_IGNORED:
                live = live & (b_id != ignore_index)
                b_count += live.to(tl.int32)
            b_bad = live & ((b_id < 0) | (b_id >= size))
        elif KIND == "indices":
            b_bad = live & (b_id >= size)
            if lengths_ptr is not None:
                b_length = tl.load(lengths_ptr + o_n // W, mask=live, other=0)
                b_bad &= (b_length >= 0) & ((o_n % W) * step < b_length + more)
            if rows_ptr is not None:
                b_bad &= tl.load(rows_ptr + o_n // W, mask=live, other=0) >= 0
        else:
            # the first is 0, none is below the one before it, and the last is the size
            b_before = tl.load(ids_ptr + o_n - 1, mask=live & (o_n > 0), other=0)
            b_bad = (b_id < b_before) | (b_id > size)
            b_bad |= ((o_n == 0) & (b_id != 0)) | ((o_n == N - 1) & (b_id != size))
            b_bad &= live
        b_first = tl.minimum(b_first, tl.where(b_bad, o_n, end))
    if inverse_count_ptr is not None:
        count = tl.maximum(tl.sum(b_count, 0), 1)
        tl.store(inverse_count_ptr, 1.0 / count.to(tl.float32))
    if slots_ptr is not None:
        first = tl.min(b_first, 0)
        if first < end:
            report(slots_ptr, tl.program_id(0), first, ids_ptr, size, last, name)


def scan(name: str, ids: Tensor, size: int, ignore_index: int | None) -> None:
    """Looks at all ids, of any shape, and changes nothing else."""
    _scan("ids", name, ids, size, last_length(ids), ignore_index)


def scan_indices(
    name: str,
    ids: Tensor,
    size: int,
    lengths: Tensor | None,
    more: int,
    step: int,
    rows: Tensor | None,
) -> None:
    """Looks at indices [N] or [N, W], as expect_below describes."""
    last = last_length(ids)
    _scan("indices", name, ids, size, last, None, max(last, 1), lengths, more, step, rows)


def scan_offsets(name: str, offsets: Tensor, tokens: int) -> None:
    """Looks at offsets [N + 1], as expect_offsets describes."""
    _scan("offsets", name, offsets, tokens, 0, None)


def scan_inverse_count(
    name: str, ids: Tensor, ignore_index: int, size: int | None = None
) -> Tensor:
    """1 / how many ids [N] are not ignored, float32 []. With a size it also looks at them."""
    out = torch.empty((), dtype=torch.float32, device=ids.device)
    _scan("ids", name, ids, size, 0, ignore_index, inverse_count=out)
    return out


def _scan(
    kind: str,
    name: str,
    ids: Tensor,
    size: int | None,
    last: int,
    ignore_index: int | None,
    W: int = 1,
    lengths: Tensor | None = None,
    more: int = 0,
    step: int = 1,
    rows: Tensor | None = None,
    inverse_count: Tensor | None = None,
) -> None:
    ids, N = ids.contiguous(), ids.numel()
    # one program counts, whose loads are wider: 32768 ids would be 32 turns of 1024
    B, warps = (BLOCK, 4) if inverse_count is None else (4 * BLOCK, 8)
    R = BLOCK * -(-N // (BLOCK * SLOTS)) if inverse_count is None else max(N, 1)
    slots = None if size is None else slots_for(ids)
    lengths, rows = (None if x is None else x.contiguous() for x in (lengths, rows))
    with _device_of(ids):
        cached(scan_ids_kernel)[(max(-(-N // R), 1),)](
            ids_ptr=ids, slots_ptr=slots, lengths_ptr=lengths, rows_ptr=rows,
            inverse_count_ptr=inverse_count, N=N, R=R, W=W, size=size or 0, more=more, step=step,
            last=last, ignore_index=ignore_index or 0, name=NAMES.index(name), KIND=kind,
            HAS_IGNORED=ignore_index is not None, B=B, num_warps=warps,
        )  # fmt: skip


def _device_of(x: Tensor) -> AbstractContextManager:
    # the interpreter's tensors have no device to be on
    here = x.device.type != "cuda" or x.get_device() == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(x.device)


def last_length(ids: Tensor) -> int:
    """The divisor that splits a position into two numbers; 0 if it is one number."""
    return ids.shape[-1] if ids.dim() > 1 else 0
