"""Matrix products that add in one order, whatever the processor and the rows beside a row. numpy's
own come from its BLAS, which chooses by the processor, and by where a row lies in the matrix, how
it adds: whether two calls have equal bits would then depend on the machine."""

from typing import Any

import numpy as np


def product(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
    """o_mn = sum_k a_mk b_kn over k = 0, 1, ..., all n of a row at once. np.einsum without
    `optimize` does not call BLAS. Of arrays in C order its innermost loop is over n and the next
    one over k, so that a row's bits depend on no other row."""
    dtype = np.result_type(a, b) if dtype is None else np.dtype(dtype)
    wide = np.promote_types(dtype, np.float32)
    a, b = (np.ascontiguousarray(x, dtype=wide) for x in (a, b))
    return np.einsum("...mk,...kn->...mn", a, b, optimize=False).astype(dtype, copy=False)
