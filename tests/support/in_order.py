"""A check under Triton's interpreter: a program reads what it wrote only behind a barrier. Nothing
says which thread has an element of a block: one may load, or overwrite, what another one has
stored, or is still to load, unless tl.debug_barrier() is in between. What is loaded too early is
NaN, which some kernels do not use. In place, where the same element of a block of the same shape is
loaded and then stored, it is the same thread. No two threads store at one address. A number that is
no block may be overwritten: between its load and its store all threads meet, at a reduction."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np


class Access(NamedTuple):
    """Addresses of a block and which of them count; they lie between first and last."""

    at: np.ndarray
    mask: np.ndarray
    first: int
    last: int

    def counted(self) -> tuple[np.ndarray, np.ndarray]:
        """The addresses that count, and of which elements they are."""
        element = np.flatnonzero(self.mask)
        return self.at.reshape(-1)[element], element


@contextmanager
def in_order() -> Iterator[None]:
    """Looks at programs that are first or last of their grid's axes, as in_bounds by corners."""
    from triton.runtime import interpreter as triton

    builder: Any = triton.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    begin, barrier = builder.set_grid_idx, builder.create_barrier
    loads: list[Access] = []
    stores: list[Access] = []
    looks = True

    def begun(self: Any, *index: int) -> None:
        nonlocal looks
        begin(self, *index)
        loads.clear()
        stores.clear()
        looks = not any(0 < i < n - 1 for i, n in zip(index, self.grid_dim))

    def met(self: Any) -> Any:
        loads.clear()
        stores.clear()
        return barrier(self)

    def access(pointers: Any, mask: Any) -> Access | None:
        at = np.asarray(pointers.data)
        if not looks or not at.size:
            return None
        return Access(at, np.asarray(mask.data, dtype=bool), int(at.min()), int(at.max()))

    def shared(new: Access, olds: list[Access]) -> Iterator[tuple[Access, np.ndarray, np.ndarray]]:
        """Earlier ones of the same addresses, and the elements of these, new and old."""
        for old in olds:
            if old.first <= new.last and new.first <= old.last:
                (at, element), (before, was) = new.counted(), old.counted()
                _, i, j = np.intersect1d(at, before, return_indices=True)
                if i.size:
                    yield old, element[i], was[j]

    def loaded(self: Any, pointers: Any, mask: Any, *args: Any, **named: Any) -> Any:
        found = load(self, pointers, mask, *args, **named)
        new = access(pointers, mask)
        if new:
            for _, i, _ in shared(new, stores):
                kind = found.data.dtype.kind
                assert kind == "f" or found.dtype.scalar.is_bf16(), (
                    "no barrier before these numbers"
                )
                found.data = found.data.copy()
                found.data.reshape(-1)[i] = np.nan if kind == "f" else 0x7FFF
            loads.append(new)
        return found

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *args: Any, **named: Any) -> Any:
        new = access(pointers, mask)
        if new:
            for old, i, j in shared(new, loads if new.at.size > 1 else []):
                same = old.at.shape == new.at.shape and (i == j).all()
                assert same, f"{i.size} elements are overwritten that other threads may still load"
            for _, i, j in shared(new, stores):
                assert (i == j).all(), f"{i.size} elements are stored twice, by other threads"
            at, _ = new.counted()
            assert np.unique(at).size == at.size, "elements of a block are stored at one address"
            stores.append(new)
        return store(self, pointers, value, mask, *args, **named)

    with (
        patch.object(builder, "create_masked_load", loaded),
        patch.object(builder, "create_masked_store", stored),
        patch.object(builder, "set_grid_idx", begun),
        patch.object(builder, "create_barrier", met),
    ):
        yield
