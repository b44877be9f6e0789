"""The emulator's shared memory, and what each thread knows of the partition that it runs."""

import threading
from typing import Any

import numpy as np

from tests.gluon_emulator.values import DTYPE, Tensor, tensor

_LOCAL = threading.local()


class Buffer:
    """Shared memory; poisoned until it is written."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.shape, self.dtype = data, data.shape, DTYPE

    def index(self, i: Any) -> Any:
        i = int(i)
        assert 0 <= i < self.data.shape[0], f"tile {i} of {self.data.shape[0]}"
        return self.data[i, 0] if self.data.dtype == object else Buffer(self.data[i])

    def permute(self, order: tuple[int, ...]) -> "Buffer":
        return Buffer(self.data.transpose(order))

    def slice(self, start: int, length: int, dim: int = 0) -> "Buffer":
        assert 0 <= start <= self.data.shape[dim] - length
        part = slice(start, start + length)
        return Buffer(self.data[part] if dim == 0 else self.data[:, part])

    def load(self, layout: Any) -> Tensor:
        _LOCAL.part.loads(self.data)
        return tensor(self.data.copy())

    def store(self, values: Any) -> None:
        assert self.shape == values.shape
        _LOCAL.part.stores(self.data)
        self.data[...] = values
