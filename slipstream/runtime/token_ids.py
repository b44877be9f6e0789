"""Indices against what they index: token ids, rows and pages of caches, slots of states, offsets.

On the CPU a wrong one is an error at once. On a device a kernel writes it to pinned host memory.
The next launch of any operator (runtime/guarded_launch.py:Guard) reads one word there, and waits
for the device only if it is set: so the error comes in the next call, or still in this one if the
device was quick.
SLIPSTREAM_CHECK=sync waits in every call instead.
"""

import ctypes
import os
import weakref
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slipstream.common import checks, varlen
from slipstream.runtime import autograd, launch_cache
from slipstream.runtime.backends import HAVE_TRITON, is_fake
from slipstream.runtime.dispatch import TRITON_OR_EAGER

CHECK = os.environ.get("SLIPSTREAM_CHECK", "")
if CHECK not in ("", "sync"):
    raise ValueError(f"SLIPSTREAM_CHECK: want sync or nothing, got {CHECK!r}")
SYNC = CHECK == "sync"
# What may be found wrong, by the number that kernels know it by. Of the first, what they index; of
# INDICES a negative one means none.
TABLES = {"input_ids": "vocabulary", "target": "vocabulary", "positions": "table"}
TABLES |= {"beam_idx": "rows", "batch_select_indices": "rows", "logits_to_keep": "tokens"}
INDICES = ("state_indices", "conv_state_indices", "cache_seqlens", "cache_batch_idx")
INDICES += ("cache_leftpad", "block_table", "table", "state_batch_indices", "indices")
INDICES += ("slots", "into_slots", "dst_state_batch_indices", "state['length']", "selected")
OFFSETS = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "query_start_loc")
NAMES = (*TABLES, *INDICES, *OFFSETS)
# The label that no loss is made of, as torch's cross entropy has it.
IGNORED = -100
# A slot is one program's, so that two never write the same words; of each: position + 1, id,
# size, length of the last dimension or 0 if it is the only one, number of the name.
SLOTS, WORDS = 4096, 5


class WrongId(ValueError):
    """An index outside of what it indexes: names it, its position and the size of that."""


def expect_ids(name: str, ids: Tensor, size: int, ignore_index: int | None = None) -> None:
    """Every id is in [0, size) or the ignored one; on CUDA the next call raises.

    Raises:
        ValueError: names the first id outside, its position and the size.
    """
    if ids.is_cuda:
        if HAVE_TRITON and not torch.compiler.is_compiling() and ids.numel():
            raise_pending()
            _scan(name, ids, checks.plain_int(size), ignore_index)
            launched()
        return
    if not ids.is_cpu or ids.numel() == 0 or is_fake(ids):
        return
    low, high = torch.aminmax(ids)
    if int(low) >= 0 and int(high) < size:
        return
    outside = (ids < 0) | (ids >= size)
    if ignore_index is not None:
        outside &= ids != ignore_index
    if bool(outside.any()):
        where = tuple(outside.nonzero()[0].tolist())
        raise _error(name, int(ids[where]), where, size)


def expect_below(
    name: str,
    indices: Tensor | None,
    size: int,
    of: str,
    *,
    lengths: Tensor | None = None,
    more: int = 0,
    step: int = 1,
    rows: Tensor | None = None,
) -> None:
    """Refuses an index [N] or [N, W] past a pool of `size`; on CUDA the next call raises.

    A negative one means none. Nothing is looked at while torch.compile traces.

    Args:
        lengths: [N], column j counts where j * step is below lengths + more; no negative length.
        rows: [N], only those count that are not negative.

    Raises:
        ValueError: names the largest index.
    """
    if indices is None or indices.numel() == 0 or torch.compiler.is_compiling():
        return
    assert name in INDICES, name  # on a CPU too: kernels know it by its number
    if indices.is_cuda:
        if HAVE_TRITON and not _looked_at(name, indices, size, lengths, more, rows):
            sizes = checks.plain_int(size), lengths, checks.plain_int(more)
            _on_device(name, indices, "scan_indices", (*sizes, step, rows))
        return
    if not indices.is_cpu or is_fake(indices):
        return
    if lengths is not None:
        used = torch.where(lengths < 0, 0, lengths + more)
        at = torch.arange(indices.shape[1], device="cpu") * step
        indices = indices.masked_fill(at >= used[:, None], -1)
    if rows is not None:
        indices = indices.masked_fill(rows < 0, -1)
    if (largest := int(indices.max())) >= size:
        raise ValueError(f"{name}: want less than the {size} {of}, got {largest}")


def expect_unique(name: str, indices: Tensor, of: str) -> None:
    """Refuses an index [N] that comes twice, but for negative ones; only on the host, since on a
    device it would be a sync.

    Raises:
        ValueError: has all of them.
    """
    if indices.is_cpu and not is_fake(indices):
        used = indices[indices >= 0]
        if used.unique().numel() < used.numel():
            raise ValueError(f"{name}: want each {of} at most once, got {indices.tolist()}")


def expect_offsets(name: str, offsets: Tensor, tokens: int) -> None:
    """They go from 0 to the number of tokens and never fall; on CUDA the next call raises.

    Raises:
        ValueError: names the offset.
    """
    if torch.compiler.is_compiling() or is_fake(offsets):
        return
    assert name in OFFSETS, name  # as in expect_below
    if not offsets.is_cuda:
        varlen.check_cu_seqlens_values(offsets, tokens, name)
    elif HAVE_TRITON and not _looked_at(name, offsets, tokens):
        _on_device(name, offsets, "scan_offsets", (checks.plain_int(tokens),))


# name -> the tensors that were looked at last, and as what: layers share their indices
_last: dict[str, tuple[list[weakref.ref], tuple]] = {}


def _looked_at(name: str, *given: Any) -> bool:
    """Whether the same was looked at before and is as it was; if not, it is what was last."""
    tensors = [x for x in given if isinstance(x, Tensor)]
    for x in tensors:
        if type(x) is not Tensor or x.is_inference():
            return False
    if launch_cache.of_thread.warmup is not None:  # launches only compile
        return False
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    state = tuple([x._version if isinstance(x, Tensor) else x for x in given])
    refs, before = _last.get(name, ([], ()))
    if state == before and all(ref() is x for ref, x in zip(refs, tensors, strict=True)):
        return True
    _last[name] = [weakref.ref(x) for x in tensors], state
    return False


def _on_device(name: str, indices: Tensor, scan: str, rest: tuple) -> None:
    """Has a kernel look at the indices."""
    from slipstream.runtime import guarded_launch

    raise_pending()
    if is_fake(indices):
        return
    with guarded_launch.Guard(
        TRITON_OR_EAGER,
        indices.device,
        lambda: (f"ids.{scan}", indices.dtype, *(x is not None for x in rest)),
    ) as usable:
        if usable:
            with autograd.untraced() if autograd.is_tracing() else nullcontext():
                getattr(_kernels(), scan)(name, indices, *rest)
    launched()


def clamped(ids: Tensor, size: int) -> Tensor:
    """Ids that are safe to gather with where `expect_ids` did not look."""
    return ids if ids.is_cpu else ids.clamp(0, size - 1)


def raise_pending() -> None:
    """Raises for the first wrong id that a kernel has found since; the others are forgotten.

    A read of host memory for each device in use. Nothing while torch.compile traces or launches
    only compile, whose errors are dropped, and while a graph is captured nothing yet.

    Raises:
        ValueError: as expect_ids.
    """
    if torch.compiler.is_compiling() or launch_cache.of_thread.warmup is not None:
        return
    for watch in _watches:
        if watch.word.value:
            watch.read()


def synchronize() -> None:
    """Waits for the devices that ids were read on, then raises for a wrong one.

    Raises:
        ValueError: names the id, its position and the size of the vocabulary.
    """
    for watch in _watches:
        watch.wait()
    raise_pending()


def launched() -> None:
    """Called after each launch that may have found a wrong index."""
    if SYNC and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        synchronize()


def slots_for(ids: Tensor) -> Tensor:
    """Slots where kernels on the ids' device leave what they find: int64 [1 + SLOTS * WORDS]."""
    if type(ids) is not Tensor:  # traced on a device that is not there
        return ids.new_empty(1 + SLOTS * WORDS, dtype=torch.int64)
    index = ids.get_device()
    if index not in _by_index:
        _by_index[index] = _Watch(index)
        _watches.append(_by_index[index])
    return _by_index[index].slots


class _Watch:
    """One device's slots, in memory of the host: page-locked, so the device may write there."""

    def __init__(self, index: int) -> None:
        self.index = index
        with torch.inference_mode(False):  # it outlives the caller's
            self.slots = torch.zeros(
                1 + SLOTS * WORDS, dtype=torch.int64, device="cpu", pin_memory=index >= 0
            )
        self.address = self.slots.data_ptr()  # while calls are recorded it gives no number
        self.word = ctypes.c_int64.from_address(self.address)

    def wait(self) -> None:
        if self.index >= 0:
            torch.cuda.synchronize(self.index)

    def read(self) -> None:
        if self.index >= 0 and torch.cuda.is_current_stream_capturing():
            return
        self.wait()  # a program that began earlier may still be writing
        slots = self.slots[1:].view(SLOTS, WORDS)
        found = min(slots[slots[:, 0] > 0].tolist())
        # not an operation of torch: a mode may keep those from memory that was there before
        # (parallel_compile.py), and the same error would come once more
        ctypes.memset(self.address, 0, self.slots.nbytes)
        _last.clear()  # the same wrong ones again are reported again
        after, i, size, last, name = found
        flat = after - 1
        where = (flat // last, flat % last) if last else (flat,)
        raise _error(NAMES[name], i, where, size)


_watches: list[_Watch] = []
_by_index: dict[int, _Watch] = {}


def _error(name: str, i: int, where: tuple[int, ...], size: int) -> WrongId:
    if name in INDICES:
        return WrongId(f"{name}: want less than {size}, got {i} at position {where}")
    if name in OFFSETS:
        return WrongId(
            f"{name}: want offsets from 0 to the {size} tokens given that never fall, got {i} at "
            f"position {where}"
        )
    return WrongId(f"{name}: id {i} at position {where} is outside the {TABLES[name]} of {size}")


def _scan(name: str, ids: Tensor, size: int, ignore_index: int | None) -> None:
    from slipstream.runtime import guarded_launch

    if is_fake(ids):
        return
    with guarded_launch.Guard(
        TRITON_OR_EAGER, ids.device, lambda: ("ids.triton", ids.dtype, ignore_index is not None)
    ) as usable:
        if usable:
            with autograd.untraced() if autograd.is_tracing() else nullcontext():
                _kernels().scan(name, ids, size, ignore_index)


@cache
def _kernels() -> Any:
    """Triton is imported only here, once it is wanted."""
    from slipstream.runtime import token_ids_kernel

    return token_ids_kernel
