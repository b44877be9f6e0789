"""The vector that is erased, forward and backward; erase.py has the formula.

A program has a tile of elements, which are all independent: each is read once and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime import launch_cache

# elements of a program, 16 a thread of four warps
TILE = 2048


@triton.jit
def _load(p, m):
    return tl.load(p, mask=m, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["size"])
def erase_kernel(
    da_ptr, g_ptr, k_ptr, b_ptr, a_ptr, dg_ptr, dk_ptr, db_ptr, size, TILE: tl.constexpr
):  # fmt: skip
    """Grid (ceil(size / TILE)). All [size]; b is 1 if None. Writes a, or with da the gradients,
    each in the dtype of its tensor."""
    # tokens times channels may be more than 32 bits
    o = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    m = o < size
    if da_ptr is None:
        b_a = -tl.exp(_load(g_ptr + o, m)) * _load(k_ptr + o, m)
        if b_ptr is not None:
            b_a *= _load(b_ptr + o, m)
        tl.store(a_ptr + o, b_a.to(a_ptr.dtype.element_ty), mask=m)
    else:
        b_k = _load(k_ptr + o, m)
        b_d = -_load(da_ptr + o, m) * tl.exp(_load(g_ptr + o, m))
        b_dk = b_d
        if b_ptr is not None:
            b_b = _load(b_ptr + o, m)
            b_db = b_d * b_k
            tl.store(db_ptr + o, b_db.to(db_ptr.dtype.element_ty), mask=m)
            b_dk *= b_b
        tl.store(dk_ptr + o, b_dk.to(dk_ptr.dtype.element_ty), mask=m)
        # the exponential is its own derivative: dg = da a, which is dk k
        b_dg = b_dk * b_k
        tl.store(dg_ptr + o, b_dg.to(dg_ptr.dtype.element_ty), mask=m)


def forward(g: Tensor, k: Tensor, b: Tensor | None) -> Tensor:
    a = torch.empty_like(k)
    _run(g, k, b, a_ptr=a)
    return a


def backward(da: Tensor, g: Tensor, k: Tensor, b: Tensor | None) -> list[Tensor | None]:
    """dg, dk, and db if there is b."""
    dg, dk, db = (None if x is None else torch.empty_like(x) for x in (g, k, b))
    _run(g, k, b, da_ptr=da.contiguous(), dg_ptr=dg, dk_ptr=dk, db_ptr=db)
    return [dg, dk, db]


def _run(g: Tensor, k: Tensor, b: Tensor | None, **others: Tensor | None) -> None:
    """All contiguous, of one shape; None what is not among the others."""
    tensors = dict.fromkeys(("da_ptr", "a_ptr", "dg_ptr", "dk_ptr", "db_ptr")) | others
    launch_cache.cached(erase_kernel)[(triton.cdiv(g.numel(), TILE),)](
        g_ptr=g, k_ptr=k, b_ptr=b, **tensors, size=g.numel(), TILE=TILE, num_warps=4
    )
