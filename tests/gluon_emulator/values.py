"""Numbers and addresses of emulated kernels: numpy in place of Triton's tensors, pointers and
descriptors."""

from types import SimpleNamespace
from typing import Any

import numpy as np


class Tensor(np.ndarray):
    """As Triton's: integers divide towards zero, and scalars stay tensors."""

    type = SimpleNamespace(layout=None)

    def __array_wrap__(self, x: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return np.asarray(x).view(Tensor)

    def __iadd__(self, other: Any) -> Any:  # values, not places
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other

    def __imul__(self, other: Any) -> Any:
        return self * other

    def to(self, dtype: Any, bitcast: bool = False) -> "Tensor":
        if dtype == "uint32":
            return tensor(np.mod(np.asarray(self), 2**32))
        if bitcast:  # all numbers have 64 bits here
            return (
                tensor(np.asarray(self, np.float64).view(np.int64))
                if dtype == "int32"
                else (tensor(np.asarray(self).view(np.float64)))
            )
        is_float = np.asarray(self).dtype.kind == "f"
        return tensor(np.asarray(self).astype(int)) if is_float and "int" in str(dtype) else self

    def permute(self, order: tuple[int, ...]) -> "Tensor":
        return tensor(np.transpose(self, order))

    def __floordiv__(self, other: Any) -> Any:
        return tensor(np.trunc(np.asarray(self) / np.asarray(other)).astype(np.int64))

    def __rfloordiv__(self, other: Any) -> Any:
        return tensor(other) // self

    def __mod__(self, other: Any) -> Any:
        return self - self // other * other


def tensor(x: Any) -> Tensor:
    return np.asarray(x).view(Tensor)


class Pointer:
    def __init__(self, data: np.ndarray, at: Any = 0) -> None:
        self.data, self.at = data, at
        self.dtype = SimpleNamespace(element_ty="16-bit")

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.data, self.at + np.asarray(offset))

    def __getitem__(self, places: Any) -> "Pointer":
        return Pointer(self.data, np.asarray(self.at)[places])


class _Dtype(str):
    primitive_bitwidth = 16


DTYPE = _Dtype("16-bit")


class Descriptor:
    def __init__(self, data: np.ndarray, block: tuple[int, ...]) -> None:
        self.data, self.dtype, self.layout = data, DTYPE, None
        self.block_shape = list(block)
        self.block_type = SimpleNamespace(nbytes=int(np.prod(block)), shape=block)
        self.block = block

    def part(self, at: list) -> np.ndarray:
        """The part of a block that lies within the tensor, which it may follow or precede as a
        whole."""
        begin = [int(x) for x in at]
        assert len(begin) == len(self.block)
        if min(begin) < 0:
            assert any(x + n <= 0 for x, n in zip(begin, self.block))
            return self.data[:0, : self.block[-1]]
        return self.data[tuple(slice(x, x + n) for x, n in zip(begin, self.block))]


class Constexpr:
    """The value itself; of Names, an instance that has it."""

    def __new__(cls, value: Any, *more: Any, **options: Any) -> Any:
        return value if cls is Constexpr else super().__new__(cls)

    def __init__(self, value: Any) -> None:
        self.value = value
