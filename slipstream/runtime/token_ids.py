"""Token ids against the vocabulary: reading outside of it is the commonest way to a crash.

On the CPU a wrong id is an error at once. On a device a kernel leaves it in host memory that the
device writes into and nobody has to fetch; the operator that is called next, whichever it is
(runtime/guarded_launch.py:attempt), finds it by one read of a word there, and only then waits for
the device. SLIPSTREAM_CHECK=sync waits in every call instead.
"""

import ctypes
import importlib.util
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

HAVE_TRITON = importlib.util.find_spec("triton") is not None
CHECK = os.environ.get("SLIPSTREAM_CHECK", "")
if CHECK not in ("", "sync"):
    raise ValueError(f"SLIPSTREAM_CHECK: want sync or nothing, got {CHECK!r}")
SYNC = CHECK == "sync"
# What may be found wrong, by the number that kernels know it by, and what it indexes.
TABLES = {"input_ids": "vocabulary", "target": "vocabulary", "positions": "table"}
NAMES = tuple(TABLES)
# A slot is one program's, so that two never write the same words; of each: position + 1, id,
# size, length of the last dimension or 0 if it is the only one, number of the name.
SLOTS, WORDS = 4096, 5


class WrongId(ValueError):
    """An id outside of the vocabulary: names it, its position and the vocabulary's size."""


def expect_ids(name: str, ids: Tensor, size: int, ignore_index: int | None = None) -> None:
    """Every id is in [0, size) or the ignored one; on CUDA the next call raises.

    Raises:
        ValueError: names the first id outside, its position and the size.
    """
    if ids.device.type == "cuda":
        if HAVE_TRITON and not torch.compiler.is_compiling() and ids.numel():
            raise_pending()
            _scan(name, ids, size, ignore_index)
            launched()
        return
    if ids.device.type != "cpu" or ids.numel() == 0:
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


def expect_below(name: str, indices: Tensor | None, size: int, of: str) -> None:
    """On the CPU, no index into a pool of `size` is past it; a negative one means none.

    On a device nothing is looked at: reading an index there would wait for it.

    Raises:
        ValueError: names the largest index.
    """
    if indices is None or indices.device.type != "cpu" or indices.numel() == 0:
        return
    if torch.compiler.is_compiling():
        return
    if (largest := int(indices.max())) >= size:
        raise ValueError(f"{name}: want less than the {size} {of}, got {largest}")


def clamped(ids: Tensor, size: int) -> Tensor:
    """Ids that are safe to gather with where `expect_ids` did not look."""
    return ids if ids.device.type == "cpu" else ids.clamp(0, size - 1)


def raise_pending() -> None:
    """Raises for the first wrong id that a kernel has found since; the others are forgotten.

    A read of host memory for each device in use. Nothing while torch.compile traces, and while a
    graph is captured nothing yet.

    Raises:
        ValueError: as expect_ids.
    """
    if torch.compiler.is_compiling():
        return
    for watch in _watches:
        if watch.word.value:
            watch.read()


def synchronize() -> None:
    """Waits for the devices that ids were read on, then raises for a wrong one.

    Raises:
        ValueError: names the id, its position and the size of the vocabulary.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for watch in _watches:
        watch.wait()
    raise_pending()


def launched() -> None:
    """After each launch that may have found something."""
    if SYNC and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        synchronize()


def slots_for(ids: Tensor) -> Tensor:
    """Where kernels on the ids' device leave what they find: int64 [1 + SLOTS * WORDS]."""
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
        self.word = ctypes.c_int64.from_address(self.slots.data_ptr())

    def wait(self) -> None:
        if self.index >= 0:
            torch.cuda.synchronize(self.index)

    def read(self) -> None:
        if self.index >= 0 and torch.cuda.is_current_stream_capturing():
            return
        self.wait()  # a program that began earlier may still be writing
        slots = self.slots[1:].view(SLOTS, WORDS)
        found = min(slots[slots[:, 0] > 0].tolist())
        self.slots.zero_()
        after, i, size, last, name = found
        flat = after - 1
        where = (flat // last, flat % last) if last else (flat,)
        raise _error(NAMES[name], i, where, size)


_watches: list[_Watch] = []
_by_index: dict[int, _Watch] = {}


def _error(name: str, i: int, where: tuple[int, ...], size: int) -> WrongId:
    return WrongId(f"{name}: id {i} at position {where} is outside the {TABLES[name]} of {size}")


def _scan(name: str, ids: Tensor, size: int, ignore_index: int | None) -> None:
    from slipstream.runtime import custom_op, guarded_launch

    if not custom_op.is_fake(ids):
        args = (name, ids, size, ignore_index)
        guarded_launch.run_guarded(
            lambda: ("ids.triton", ids.dtype, ignore_index is not None),
            ids.device,
            _kernels().scan,
            lambda *args: None,
            args,
        )


@cache
def _kernels() -> Any:
    """Triton is imported only here, once it is wanted."""
    from slipstream.runtime import token_ids_kernel

    return token_ids_kernel
