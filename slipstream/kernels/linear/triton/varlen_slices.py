"""Packed sequences in slices of tokens: where they lie in a slice, and the states at its borders.

A slice of `each` tokens from lo on is a packed call of its own: sequence n has the tokens from
clamp(cu[n] - lo, 0, each) on, most have none, and that which crosses lo, the last with cu[n] <= lo,
begins with the state that the slice before has left. All others keep theirs. Which one
crosses is known to the device alone, so the state at a border is copied by its number.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime.backends import device_of
from slipstream.runtime.launch_cache import cached

BLOCK = 1024
ALIGNED = 4  # int32 of 16 bytes: where the offsets of a span begin


@triton.jit(do_not_specialize=["N", "each", "stride"])
def slice_offsets_kernel(
    cu_ptr,  # [N + 1]
    local_ptr,  # [slices, stride]
    crossing_ptr,  # [slices]
    N,
    each,
    stride,
    BLOCK: tl.constexpr,
):
    """grid (slices,)"""
    i = tl.program_id(0).to(tl.int64)
    lo = i * each
    begun = 0
    for at in range(0, N + 1, BLOCK):
        o_n = at + tl.arange(0, BLOCK)
        m_n = o_n <= N
        b_cu = tl.load(cu_ptr + o_n, mask=m_n, other=0).to(tl.int64)
        begun += tl.sum((m_n & (b_cu <= lo)).to(tl.int32), 0)
        b_local = tl.minimum(tl.maximum(b_cu - lo, 0), each).to(tl.int32)
        tl.store(local_ptr + i * stride + o_n, b_local, mask=m_n)
    tl.store(crossing_ptr + i, tl.minimum(tl.maximum(begun - 1, 0), N - 1))


@triton.jit(do_not_specialize=["i", "size"])
def save_carry_kernel(
    states_ptr,  # [N, size]
    checkpoint_ptr,  # [size]
    crossing_ptr,  # [slices]
    i,
    size,
    BLOCK: tl.constexpr,
):
    """grid (ceil(size / BLOCK),): checkpoint <- the state that crosses into slice i."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(crossing_ptr + i).to(tl.int64) * size
    tl.store(checkpoint_ptr + o, tl.load(states_ptr + row + o, mask=o < size), mask=o < size)


@triton.jit(do_not_specialize=["i", "count", "size"])
def load_carry_kernel(
    entry_ptr,  # [N, size]
    begins_ptr,  # [N, size]
    checkpoints_ptr,  # [slices - 1, size]
    crossing_ptr,  # [slices]
    i,
    count,
    size,
    HAS_BEGINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid (ceil(size / BLOCK),): entry, of slice i + 1, becomes what slice i begins with.

    The sequence that crosses into slice i + 1 begins again as all others do, unless it crosses into
    span i too.
    """
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < size
    if i + 1 < count:
        row = tl.load(crossing_ptr + i + 1).to(tl.int64) * size
        if HAS_BEGINS:
            b_s = tl.load(begins_ptr + row + o, mask=m).to(tl.float32)
        else:
            b_s = tl.zeros((BLOCK,), tl.float32)
        tl.store(entry_ptr + row + o, b_s, mask=m)
    if i > 0:
        row = tl.load(crossing_ptr + i).to(tl.int64) * size
        at = (i - 1).to(tl.int64) * size
        tl.store(entry_ptr + row + o, tl.load(checkpoints_ptr + at + o, mask=m), mask=m)


class TritonVarlenSlices(NamedTuple):
    """Of the slices that packed sequences are cut into."""

    local: list[Tensor]  # [N + 1] of each span: cu_seqlens
    crossing: Tensor  # [slices]: the sequence that crosses the border before each

    def save_carry(self, states: Tensor, checkpoint: Tensor, i: int) -> None:
        """checkpoint [1, HV, K, V] is written: what crosses into slice i, of states."""
        size = checkpoint.numel()
        launch: Any = cached(save_carry_kernel)[(-(-size // BLOCK),)]
        with device_of(checkpoint.device):
            launch(states, checkpoint, self.crossing, i, size, BLOCK=BLOCK, num_warps=4)

    def load_carry(self, entry: Tensor, begins: Tensor | None, checkpoints: Tensor, i: int) -> None:
        """entry [N, HV, K, V], what slice i + 1 begins with, becomes what slice i does.

        Args:
            begins: what the sequences begin with, zeros if None.
            checkpoints: of keep, of all borders.
        """
        count, size = len(self.local), entry[0].numel()
        launch: Any = cached(load_carry_kernel)[(-(-size // BLOCK),)]
        flags: dict[str, Any] = {"HAS_BEGINS": begins is not None, "BLOCK": BLOCK, "num_warps": 4}
        with device_of(entry.device):
            launch(
                entry_ptr=entry,
                begins_ptr=begins,
                checkpoints_ptr=checkpoints,
                crossing_ptr=self.crossing,
                i=i,
                count=count,
                size=size,
                **flags,
            )


def make_varlen_slices(cu_seqlens: Tensor, slices: Sequence[slice]) -> TritonVarlenSlices:
    """slices: of as many tokens each, but for the last."""
    N, count = cu_seqlens.shape[0] - 1, len(slices)
    stride = -(-(N + 1) // ALIGNED) * ALIGNED
    make: dict[str, Any] = {"dtype": torch.int32, "device": cu_seqlens.device}
    local = torch.empty(count, stride, **make)
    crossing = torch.empty(count, **make)
    launch: Any = cached(slice_offsets_kernel)[(count,)]
    with device_of(cu_seqlens.device):
        launch(
            cu_seqlens.contiguous(),
            local,
            crossing,
            N,
            slices[0].stop - slices[0].start,
            stride,
            BLOCK=256,
            num_warps=4,
        )
    return TritonVarlenSlices([local[i, : N + 1] for i in range(count)], crossing)
