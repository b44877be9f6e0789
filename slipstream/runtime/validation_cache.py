"""What checks look at, as a key: a call just like one that has passed need not be checked again.

Checks read nothing of a tensor but shape, dtype and device, so they are exactly as strict from a
dictionary, at a fifth of the time.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

# Calls that differ in shapes are few, but a server's lengths are not: past this it starts anew.
_MAX_ENTRIES = 4096


def signature(tensors: Iterable[Tensor | None], *rest: Hashable) -> tuple | None:
    """Shape, dtype and device of each, the rest and their types, as 64 is not 64.0; None where
    shapes may be symbols."""
    if torch.compiler.is_compiling():
        return None
    parts: list[Any] = [*rest, *map(type, rest)]
    for x in tensors:
        if x is not None:
            if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
                return None
            parts.append((x.shape, x.dtype, x.device))
        else:
            parts.append(None)
    return tuple(parts)


class ValidationCache:
    """Results by signature."""

    def __init__(self) -> None:
        self._by_key: dict[tuple, Any] = {}

    def get(self, key: tuple | None, make: Callable[[], Any]) -> Any:
        """make(), or what it returned for the same key; what it raises is not remembered."""
        if key is None:
            return make()
        found = self._by_key.get(key)
        if found is None:
            if len(self._by_key) >= _MAX_ENTRIES:
                self._by_key.clear()
            found = self._by_key[key] = make()
        return found
