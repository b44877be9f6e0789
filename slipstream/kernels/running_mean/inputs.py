"""The inputs of the running mean, as one value."""

from typing import NamedTuple

from torch import Tensor


class MeanInputs(NamedTuple):
    """All contiguous.

    Args:
        k, v: [B, T, D], any floating dtypes but float64. w, u: [D], float32. start: M and z before
            the first token [N, 2 D], float32; M is 0 where z is -inf.
    """

    k: Tensor
    v: Tensor
    w: Tensor
    u: Tensor
    start: Tensor
    cu_seqlens: Tensor | None
