"""Tensor descriptors, by which TMA loads and stores tiles."""

from typing import Any

from torch import Tensor


def tma_descriptors(tensors: list[Tensor | None], widths: list[int], C: int) -> list[Any] | None:
    """Tensor descriptors [1, C, 1, width] of each, or None if one can't have any."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    given = [x for x in tensors if x is not None]
    if any(x.shape[-1] * x.element_size() % 16 or x.data_ptr() % 16 for x in given):
        return None
    return [
        None
        if x is None
        else TensorDescriptor(x, list(x.shape), list(x.stride()), [1, C, 1, int(width)])
        for x, width in zip(tensors, widths)
    ]
