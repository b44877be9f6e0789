"""A check under Triton's interpreter: no load or store outside of the tensors of its launch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor


@contextmanager
def in_bounds(corners: bool = False) -> Iterator[None]:
    """Elsewhere than between the first and the last element of a tensor, in a storage that is
    larger too, is an error. A GPU only notices where no memory is. corners: only by programs that
    are first or last of their grid's axes, which mostly are those beside a tensor's ends."""
    from triton.runtime import interpreter as triton

    executor: Any = triton.GridExecutor
    builder: Any = triton.InterpreterBuilder
    take, load, store = (
        executor._init_args_hst,
        builder.create_masked_load,
        builder.create_masked_store,
    )
    ranges: list[tuple[int, int]] = []

    def taken(self: Any, args: Any, kwargs: Any) -> Any:
        found = take(self, args, kwargs)
        tensors = _tensors((*found[0], *found[1].values()))
        ranges[:] = [(x.data_ptr(), x.data_ptr() + _bytes(x)) for x in tensors]
        return found

    def check(self: Any, pointers: Any, mask: Any) -> None:
        if corners and any(0 < i < n - 1 for i, n in zip(self.grid_idx, self.grid_dim)):
            return
        at = np.asarray(pointers.data)[np.asarray(mask.data, dtype=bool)].astype(np.int64)
        if not at.size:
            return
        size = pointers.get_element_ty().primitive_bitwidth // 8
        first, last = int(at.min()), int(at.max()) + size
        # mostly all of one tensor
        if any(begin <= first and last <= end for begin, end in ranges):
            return
        inside = np.zeros(at.shape, dtype=bool)
        for begin, end in ranges:
            inside |= (at >= begin) & (at + size <= end)
        assert inside.all(), f"{(~inside).sum()} of {inside.size} addresses are outside"

    def loaded(self: Any, pointers: Any, mask: Any, *args: Any, **named: Any) -> Any:
        check(self, pointers, mask)
        return load(self, pointers, mask, *args, **named)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *args: Any, **named: Any) -> Any:
        check(self, pointers, mask)
        return store(self, pointers, value, mask, *args, **named)

    with (
        patch.object(executor, "_init_args_hst", taken),
        patch.object(builder, "create_masked_load", loaded),
        patch.object(builder, "create_masked_store", stored),
    ):
        yield


def _tensors(args: Any) -> Iterator[Tensor]:
    """Of a launch's arguments, descriptors' too."""
    for x in args:
        x = getattr(x, "base", x)
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from _tensors(x)


def _bytes(x: Tensor) -> int:
    """From the first element to the last one."""
    if x.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()
