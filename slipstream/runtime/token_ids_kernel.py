"""Kernels that leave a wrong index where runtime/token_ids.py looks for it.

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


@triton.jit(do_not_specialize=["N", "R", "size", "last", "ignore_index", "name"])
def scan_kernel(
    ids_ptr, slots_ptr, N, R, size, last, ignore_index, name,
    HAS_IGNORED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Grid (N / R), R a multiple of B."""
    begin = tl.program_id(0).to(tl.int64) * R
    end = tl.minimum(begin + R, N)
    first = end
    for o in range(begin, end, B):
        o_n = o + tl.arange(0, B)
        b_id = tl.load(ids_ptr + o_n, mask=o_n < end, other=0)
        b_bad = (o_n < end) & ((b_id < 0) | (b_id >= size))
        if HAS_IGNORED:
            b_bad &= b_id != ignore_index
        first = tl.minimum(first, tl.min(tl.where(b_bad, o_n, end), 0))
    if first < end:
        report(slots_ptr, tl.program_id(0), first, ids_ptr, size, last, name)


def scan(name: str, ids: Tensor, size: int, ignore_index: int | None) -> None:
    """Looks at all ids, of any shape, and changes nothing else."""
    ids, N = ids.contiguous(), ids.numel()
    R = BLOCK * -(-N // (BLOCK * SLOTS))
    slots = slots_for(ids)
    with _device_of(ids):
        cached(scan_kernel)[(-(-N // R),)](
            ids_ptr=ids, slots_ptr=slots, N=N, R=R, size=size, last=last_length(ids),
            ignore_index=ignore_index or 0, name=NAMES.index(name),
            HAS_IGNORED=ignore_index is not None, B=BLOCK, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["N", "R", "W", "size", "more", "step", "last", "name"])
def scan_indices_kernel(
    ids_ptr,  # [N / W, W]
    slots_ptr,
    lengths_ptr,  # [N / W]
    rows_ptr,  # [N / W]
    N, R, W, size, more, step, last, name,
    HAS_LENGTHS: tl.constexpr, HAS_ROWS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """As scan_kernel, of indices that are none where they are negative."""
    begin = tl.program_id(0).to(tl.int64) * R
    end = tl.minimum(begin + R, N)
    first = end
    for o in range(begin, end, B):
        o_n = o + tl.arange(0, B)
        live = o_n < end
        b_bad = live & (tl.load(ids_ptr + o_n, mask=live, other=0) >= size)
        if HAS_LENGTHS:
            b_length = tl.load(lengths_ptr + o_n // W, mask=live, other=0)
            b_bad &= (b_length >= 0) & ((o_n % W) * step < b_length + more)
        if HAS_ROWS:
            b_bad &= tl.load(rows_ptr + o_n // W, mask=live, other=0) >= 0
        first = tl.minimum(first, tl.min(tl.where(b_bad, o_n, end), 0))
    if first < end:
        report(slots_ptr, tl.program_id(0), first, ids_ptr, size, last, name)


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
    ids, N = ids.contiguous(), ids.numel()
    R = BLOCK * -(-N // (BLOCK * SLOTS))
    slots, W = slots_for(ids), ids.shape[-1] if ids.dim() > 1 else 1
    lengths, rows = (None if x is None else x.contiguous() for x in (lengths, rows))
    with _device_of(ids):
        cached(scan_indices_kernel)[(-(-N // R),)](
            ids_ptr=ids, slots_ptr=slots, lengths_ptr=lengths, rows_ptr=rows, N=N, R=R, W=W,
            size=size, more=more, step=step, last=last_length(ids), name=NAMES.index(name),
            HAS_LENGTHS=lengths is not None, HAS_ROWS=rows is not None, B=BLOCK, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["N", "R", "total", "name"])
def scan_offsets_kernel(offsets_ptr, slots_ptr, N, R, total, name, B: tl.constexpr):
    """Offsets [N] from 0 to the total that never fall, as scan_kernel looks at ids."""
    begin = tl.program_id(0).to(tl.int64) * R
    end = tl.minimum(begin + R, N)
    first = end
    for o in range(begin, end, B):
        o_n = o + tl.arange(0, B)
        live = o_n < end
        b_offset = tl.load(offsets_ptr + o_n, mask=live, other=0)
        # the first is 0, and none is below the one before it
        b_before = tl.load(offsets_ptr + o_n - 1, mask=live & (o_n > 0), other=0)
        b_bad = (b_offset < b_before) | (b_offset > total)
        b_bad |= ((o_n == 0) & (b_offset != 0)) | ((o_n == N - 1) & (b_offset != total))
        first = tl.minimum(first, tl.min(tl.where(live & b_bad, o_n, end), 0))
    if first < end:
        report(slots_ptr, tl.program_id(0), first, offsets_ptr, total, 0, name)


def scan_offsets(name: str, offsets: Tensor, tokens: int) -> None:
    """Looks at offsets [N + 1], as expect_offsets describes."""
    offsets, N = offsets.contiguous(), offsets.numel()
    R = BLOCK * -(-N // (BLOCK * SLOTS))
    slots = slots_for(offsets)
    with _device_of(offsets):
        cached(scan_offsets_kernel)[(-(-N // R),)](
            offsets_ptr=offsets, slots_ptr=slots, N=N, R=R, total=tokens, name=NAMES.index(name),
            B=BLOCK, num_warps=4,
        )  # fmt: skip


def _device_of(x: Tensor) -> AbstractContextManager:
    # the interpreter's tensors have no device to be on
    here = x.device.type != "cuda" or x.get_device() == torch.cuda.current_device()
    return nullcontext() if here else torch.cuda.device(x.device)


def last_length(ids: Tensor) -> int:
    """What a position is divided by to be two numbers; 0 if it is one."""
    return ids.shape[-1] if ids.dim() > 1 else 0
