"""Which of the residuals a loop is at: each is an argument of its own."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attnres.inputs import STREAMS


def named(letter: str, tensors: Sequence[Tensor]) -> dict[str, Tensor | None]:
    """Arguments of kernels."""
    given = [*tensors, *[None] * (STREAMS - len(tensors))]
    return {f"{letter}{i}_ptr": x for i, x in enumerate(given)}


@triton.jit
def stream(
    p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15, n, L: tl.constexpr
):  # fmt: skip
    """Pointer n of L: a number of the loop, as unrolled loads would all be kept."""
    p = p0
    if L > 1:
        p = tl.where(n == 1, p1, p)
    if L > 2:
        p = tl.where(n == 2, p2, p)
    if L > 3:
        p = tl.where(n == 3, p3, p)
    if L > 4:
        p = tl.where(n == 4, p4, p)
    if L > 5:
        p = tl.where(n == 5, p5, p)
    if L > 6:
        p = tl.where(n == 6, p6, p)
    if L > 7:
        p = tl.where(n == 7, p7, p)
    if L > 8:
        p = tl.where(n == 8, p8, p)
    if L > 9:
        p = tl.where(n == 9, p9, p)
    if L > 10:
        p = tl.where(n == 10, p10, p)
    if L > 11:
        p = tl.where(n == 11, p11, p)
    if L > 12:
        p = tl.where(n == 12, p12, p)
    if L > 13:
        p = tl.where(n == 13, p13, p)
    if L > 14:
        p = tl.where(n == 14, p14, p)
    if L > 15:
        p = tl.where(n == 15, p15, p)
    return p
