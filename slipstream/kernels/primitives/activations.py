"""Activations that kernels of several families apply."""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)), as exact for small results as for large ones."""
    e = tl.exp(-tl.abs(x))
    # log of 1 + e, rounded to u, is wrong by as much as u - 1 is of e
    u = 1.0 + e
    d = u - 1.0
    log = tl.where(d == 0.0, e, tl.log(u) * (e / tl.where(d == 0.0, 1.0, d)))
    return tl.maximum(x, 0.0) + log
