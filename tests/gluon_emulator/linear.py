"""The emulator for the linear family's Gluon kernels, beyond what attention's need."""

import inspect
import itertools
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from tests.gluon_emulator import threads
from tests.support.by_shape import product

ORDERS = re.compile(r"\s+(mbarrier\.wait\(.*\)|sm90\.(?:fence_async_shared\(\)|store_wait\(\d\)))$")
INPUTS_HAVE_NAN = False  # else what is not finite has been read where nothing was written


class Descriptor(threads.Descriptor):
    def __init__(self, x: Tensor, width: int, rows: int, columns: int) -> None:
        stride = width if x.is_contiguous() else x.stride(1)  # of some heads of each token
        data = x.as_strided((x.numel() // width, width), (stride, 1))
        super().__init__(data.numpy(), (rows, columns))


class Pointer(threads.Pointer):
    dtype = SimpleNamespace(element_ty="16-bit")

    def __init__(self, x: Tensor) -> None:
        behind = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
        count = x.numel() if x.is_contiguous() else behind
        super().__init__(x.as_strided((count,), (1,)).numpy())


def _copy_out(desc: Descriptor, at: list, buffer: threads.Buffer) -> None:
    row, column = (int(x) for x in at)
    assert buffer.shape == desc.block and (INPUTS_HAVE_NAN or np.isfinite(buffer.data).all())

    def finish() -> None:
        part = desc.data[row : row + desc.block[0], column : column + desc.block[1]]
        part[...] = buffer.data[: part.shape[0], : part.shape[1]]

    threads.later(finish, buffer)


class Buffer(threads.Buffer):
    def index(self, i: Any) -> Any:
        if isinstance(i, np.ndarray) and i.ndim:
            assert i.min() >= 0
            return OfWarps(self.data[i])
        found = super().index(i)
        return self._part(found.data) if isinstance(found, threads.Buffer) else found

    def _part(self, data: np.ndarray) -> "Buffer":
        return Buffer(data)

    def permute(self, order: tuple[int, ...]) -> "Buffer":
        return self._part(self.data.transpose(order))

    def slice(self, start: int, length: int, dim: int = 0) -> "Buffer":
        return self._part(super().slice(start, length, dim).data)

    layout = None

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> "Buffer":
        """A view of the memory from here on."""
        size = int(np.prod(shape))
        flat = self.data.reshape(-1)[:size]
        if flat.size < size:
            assert self.data.base is not None
            whole = self.data.base.reshape(-1)
            first = self.data.ctypes.data - whole.ctypes.data
            flat = whole[first // whole.itemsize :][:size]
        assert np.shares_memory(flat, self.data)
        return Buffer(_in_order(flat, shape, layout))


def _in_order(flat: np.ndarray, shape: list[int], order: list[int] | None) -> np.ndarray:
    """A view of that shape. order: of the last axes, first that whose neighbours lie together."""
    if order is None:
        return flat.reshape(shape)
    more = len(shape) - len(order)
    slowest = [*range(more), *(d + more for d in reversed(order))]
    return flat.reshape([shape[d] for d in slowest]).transpose(np.argsort(slowest))


class OfWarps(Buffer):
    """Tiles that each warp has its own copy of."""

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Buffer:
        assert shape[0] == 1
        return Buffer(_in_order(self.data, [len(self.data), *shape[1:]], layout))


def _scan(x: Any, axis: int, combine: Any, reverse: bool = False) -> Any:
    """Sums of one tensor; of several what `combine` makes of the parts before and the next."""
    rows = [np.moveaxis(np.asarray(y), axis, 0) for y in (x if isinstance(x, tuple) else (x,))]
    rows = [y[::-1] if reverse else y for y in rows]
    found = [np.cumsum(rows[0], 0)]
    if isinstance(x, tuple):
        steps = itertools.accumulate(zip(*rows), lambda a, b: combine(*a, *b))
        found = [np.stack(y) for y in zip(*steps)]
    found = [threads.tensor(np.moveaxis(y[::-1] if reverse else y, 0, axis)) for y in found]
    return tuple(found) if isinstance(x, tuple) else found[0]


def _dot(a: Any, b: Any, acc: Any = 0.0, **options: Any) -> Any:
    return threads.tensor(product(np.asarray(a), np.asarray(b)) + np.asarray(acc))


def _scan_sum(x: Any, axis: int, reverse: bool = False) -> Any:
    return _scan(x, axis, None, reverse)


def _allocate(dtype: Any, shape: list[int], layout: Any, values: Any = None) -> Buffer:
    made = Buffer(threads._allocate(dtype, shape, layout).data)
    if values is not None:
        made.store(values)
    return made


def halves(b: Any) -> tuple[Any, Any]:
    """Two terms of b. A product may leave out that of both low ones, here 2^-40 of all."""
    low = b * 2.0**-20
    return b - low, low


@contextmanager
def emulated() -> Any:
    """Functions of gl that these kernels need beside those of attention."""
    language, barriers = threads._language(), threads._mbarrier()
    made = SimpleNamespace(get_default_for=threads._nothing)
    vars(language).update(
        bfloat16="16-bit",
        thread_barrier=threads._nothing,
        zeros_like=lambda x: threads.tensor(np.zeros_like(x)),
        reshape=lambda x, shape: threads.tensor(np.reshape(x, shape)),
        permute=lambda x, order: threads.tensor(np.transpose(x, order)),
        min=lambda x, axis=None: threads.tensor(np.fmin.reduce(x, axis)),
        associative_scan=_scan,
        erf=lambda x: threads.tensor(np.vectorize(math.erf)(x)),
        gather=lambda x, i, axis: threads.tensor(np.take_along_axis(x, i.astype(int), axis)),
        split=lambda x: tuple(threads.tensor(x[..., i]) for i in range(2)),
        allocate_shared_memory=_allocate,
        NVMMASharedLayout=made,
        SwizzledSharedLayout=lambda *swizzle, order=None: order,
        DistributedLinearLayout=threads._nothing,
        sqrt=np.sqrt,
        cast=lambda x, dtype: threads.tensor(x),
        cumsum=_scan_sum,
        dot=_dot,
        range=lambda *ends, **options: map(threads.tensor, range(*map(int, ends))),
        trans=lambda x: threads.tensor(np.asarray(x).T),
        broadcast_to=lambda x, shape: threads.tensor(np.broadcast_to(x, shape)),
        float64="float64",
        uint32="uint32",
        sigmoid=lambda x: threads.tensor(1.0 / (1.0 + np.exp(-x))),
        log=lambda x: threads.tensor(np.log(x)),
        clamp=lambda x, least, most, propagate_nan: threads.tensor(np.clip(x, least, most)),
        PropagateNan=SimpleNamespace(ALL=None),
    )
    with (
        mock.patch.object(threads, "_language", return_value=language),
        mock.patch.object(threads, "_mbarrier", return_value=barriers),
        threads.emulated(),
    ):
        import sys

        sm90: Any = sys.modules["slipstream.kernels.primitives.sm90"]
        sm90.copy_out = _copy_out
        yield


def without(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Each line that orders what the parts of a program do, and the file without it."""
    lines = inspect.getsource(module).split("\n")
    for n, line in enumerate(lines):
        if found := ORDERS.match(line):
            rest = [*lines[:n], line.replace(found[1], "pass"), *lines[n + 1 :]]
            yield f"{module.__name__.rpartition('.')[2]}: {found[1]}", "\n".join(rest)
