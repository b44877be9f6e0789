"""The emulator's numbers rounded as a GPU rounds them: float32, and 16 bits where kernels say so.

    with rounded(torch.bfloat16):
        launches.as_numpy(monkeypatch, rounds=True)

Products are summed in float64 and rounded once, so that they do not depend on how exponents are
shared between factors, as those of an H100 do not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.gluon_emulator import linear, threads


def in_float32(x: Any) -> np.ndarray:
    x = np.asarray(x)
    if x.dtype.kind == "f":
        with np.errstate(all="ignore"):
            x = x.astype(np.float32).astype(np.float64)
    return x


_HALF = torch.bfloat16  # what 16 bits are


def in_16_bits(x: Any) -> np.ndarray:
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.array(x, np.float32)).to(_HALF).double().numpy()


def tensor(x: Any) -> threads.Tensor:
    return in_float32(x).view(threads.Tensor)


def _wrap(self: Any, x: Any, context: Any = None, return_scalar: bool = False) -> Any:
    return tensor(x)


def _to(self: Any, dtype: Any, bitcast: bool = False) -> Any:
    x = np.asarray(self)
    if bitcast and dtype == "int32":
        return tensor(x.astype(np.float32).view(np.int32).astype(np.int64))
    if bitcast:
        return tensor((x & 0xFFFFFFFF).astype(np.uint32).view(np.float32).astype(np.float64))
    return tensor(in_16_bits(x)) if dtype == "16-bit" else self


class Buffer(linear.Buffer):
    def _of_dtype(self, buffer: Any, dtype: Any) -> Any:
        if isinstance(buffer, threads.Buffer) and not isinstance(buffer, linear.OfWarps):
            buffer = Buffer(buffer.data)
            buffer.dtype = dtype
        return buffer

    def index(self, i: Any) -> Any:
        return self._of_dtype(super().index(i), self.dtype)

    def permute(self, order: tuple[int, ...]) -> Any:
        return self._of_dtype(super().permute(order), self.dtype)

    def slice(self, start: int, length: int, dim: int = 0) -> Any:
        return self._of_dtype(super().slice(start, length, dim), self.dtype)

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        return self._of_dtype(super()._reinterpret(dtype, shape, layout), dtype)

    def store(self, values: Any) -> None:
        super().store(in_16_bits(values) if self.dtype == "16-bit" else values)


def _allocate(dtype: Any, shape: list[int], layout: Any, values: Any = None) -> Buffer:
    made = Buffer(threads._allocate(dtype, shape, layout).data)
    made.dtype = dtype
    if values is not None:
        made.store(values)
    return made


def _exp2(x: Any) -> threads.Tensor:
    """As the instruction: a whole number more moves the exponent alone, unless x becomes negative,
    where other last bits come out; 0 for what is below the least normal number."""
    x = np.maximum(np.asarray(x, np.float64), -2000.0)  # of -inf no fraction could be taken
    whole = np.floor(x)
    y = in_float32(np.exp2(x - whole))
    y = np.where((x < 0) & (x != whole), np.nextafter(y.astype(np.float32), np.float32(2)), y)
    y = np.ldexp(y, np.clip(whole, -2000, 2000).astype(int))
    return tensor(np.where(y < 2.0**-126, 0.0, y))


def language() -> dict[str, Callable]:
    """Functions of gl for kernels that are imported anew, in the place of the emulator's."""
    return {"exp2": _exp2, "allocate_shared_memory": _allocate}


@contextmanager
def rounded(half: torch.dtype = torch.bfloat16) -> Iterator[None]:
    with (
        mock.patch(f"{__name__}._HALF", half),
        mock.patch.object(threads, "tensor", tensor),
        mock.patch.object(threads.Tensor, "__array_wrap__", _wrap),
        mock.patch.object(threads.Tensor, "to", _to),
    ):
        yield
