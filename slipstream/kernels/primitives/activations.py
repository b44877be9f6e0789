"""Activations that kernels of several families apply."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), as exact for small results as for large ones."""
    e = tl.exp(-tl.abs(x))
    # log of 1 + e, rounded to u, is wrong by as much as u - 1 is of e
    u = 1.0 + e
    d = u - 1.0
    log = tl.where(d == 0.0, e, tl.log(u) * (e / tl.where(d == 0.0, 1.0, d)))
    return tl.maximum(x, 0.0) + log
