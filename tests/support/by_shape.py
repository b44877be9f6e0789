"""Products and sums that are rounded as the shape of their operands says, as those of libraries on
a GPU may be: results that have equal bits here come of operands of equal shapes; and products that
add in one order, whatever the processor and the rows beside a row."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = (
    *(aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.baddbmm_, aten.linalg_solve_triangular),
    *(aten.sum, aten.cumsum, aten.logcumsumexp),
)
# Fewer are added up in one order, however many such sums there are.
MIN_TERMS = 32


class RoundedByShape(TorchDispatchMode):
    """Also by strides, and by where in 16 bytes an operand begins."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if func.overloadpacket not in PRODUCTS or not out.is_floating_point():
            return out
        given = [x for x in args if isinstance(x, Tensor)]
        if func.overloadpacket is aten.sum and given[0].numel() < MIN_TERMS * max(out.numel(), 1):
            return out
        place = hash(tuple(_layout(x) for x in given)) % 16
        return out.mul_(1 + place * torch.finfo(out.dtype).eps)


def _layout(x: Tensor) -> tuple[Any, ...]:
    strides = tuple(d for n, d in zip(x.shape, x.stride()) if n > 1)
    return *x.shape, strides, x.storage_offset() * x.itemsize % 16


def product(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
    """o_mn = sum_k a_mk b_kn over k = 0, 1, ..., all n of a row at once. numpy's own products come
    from its BLAS, which chooses by the processor, and by where a row lies in the matrix, how it
    adds: whether two calls have equal bits would then depend on the machine. np.einsum without
    `optimize` does not call it. Of arrays in C order its innermost loop is over n and the next
    one over k, so that a row's bits depend on no other row."""
    dtype = np.result_type(a, b) if dtype is None else np.dtype(dtype)
    wide = np.promote_types(dtype, np.float32)
    a, b = (np.ascontiguousarray(x, dtype=wide) for x in (a, b))
    return np.einsum("...mk,...kn->...mn", a, b, optimize=False).astype(dtype, copy=False)
