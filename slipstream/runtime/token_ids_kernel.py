"""Kernels that leave a wrong id where core.ids looks for it.

Program i has the ids [i R, (i + 1) R) and writes the first wrong one of them into slot i; the first
word of all says that there is one.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime.token_ids import NAMES, SLOTS, slots_for

BLOCK = 1024


@triton.jit
def report(slots_ptr, slot, first, ids_ptr, size, last, name):
    """The id at `first`, by one program; the five words are core.ids.WORDS."""
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
    # the interpreter's tensors have no device to be on
    here = ids.device.type != "cuda" or ids.get_device() == torch.cuda.current_device()
    with nullcontext() if here else torch.cuda.device(ids.device):
        scan_kernel[(-(-N // R),)](
            ids, slots, N, R, size, last_length(ids), ignore_index or 0, NAMES.index(name),
            ignore_index is not None, BLOCK, num_warps=4,
        )  # fmt: skip


def last_length(ids: Tensor) -> int:
    """What a position is divided by to be two numbers; 0 if it is one."""
    return ids.shape[-1] if ids.dim() > 1 else 0
