"""Rows of a table by id, in one pass that also looks for ids outside of it.

    y[n, :] = weight[min(max(ids[n], 0), V - 1), :]

N ids, V rows of D features. Program (i, j) has the ids [i R, (i + 1) R) and features of block j.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime import launch_cache, token_ids, token_ids_kernel


@triton.jit(do_not_specialize=["N", "R", "V", "last"])
def embedding_kernel(
    ids_ptr, weight_ptr, y_ptr, records_ptr, weight_stride, N, R, V, last,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (N / R, D / BD), R a multiple of BR."""
    begin = tl.program_id(0).to(tl.int64) * R
    end = tl.minimum(begin + R, N)
    o_d = (tl.program_id(1) * BD + tl.arange(0, BD))[None, :]
    # the first wrong id of the program; `end` where there is none
    first = end
    for o in range(begin, end, BR):
        o_n = o + tl.arange(0, BR)
        b_id = tl.load(ids_ptr + o_n, mask=o_n < end, other=0).to(tl.int64)
        b_bad = (o_n < end) & ((b_id < 0) | (b_id >= V))
        first = tl.minimum(first, tl.min(tl.where(b_bad, o_n, end), 0))
        # the nearest row in place of a wrong one: nothing outside of the table is read
        row = tl.minimum(tl.maximum(b_id, 0), V - 1)[:, None]
        m = (o_n < end)[:, None] & (o_d < D)
        b_y = tl.load(weight_ptr + row * weight_stride + o_d, mask=m, other=0.0)
        tl.store(y_ptr + o_n[:, None] * D + o_d, b_y, mask=m)
    # once for an id, not for every block of its features; a program has a record of its own
    if (first < end) & (tl.program_id(1) == 0):
        token_ids_kernel.report(records_ptr, tl.program_id(0), first, ids_ptr, V, last, 0)


def gather(ids: Tensor, weight: Tensor) -> Tensor:
    """ids [...] and weight [V, D] to [..., D], V > 0."""
    ids = ids.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    N, (V, D) = ids.numel(), weight.shape
    y = torch.empty(*ids.shape, D, dtype=weight.dtype, device=weight.device)
    if y.numel() == 0:
        return y
    # a tile of 2048 elements, 16 a thread
    BD = min(1 << (D - 1).bit_length(), 1024)
    BR = 2048 // BD
    # as many programs as there are records, at most
    R = BR * -(-N // (BR * token_ids.SLOTS))
    records = token_ids.slots_for(ids)
    launch_cache.cached(embedding_kernel)[(-(-N // R), -(-D // BD))](
        ids_ptr=ids,
        weight_ptr=weight,
        y_ptr=y,
        records_ptr=records,
        weight_stride=weight.stride(0),
        N=N,
        R=R,
        V=V,
        last=token_ids_kernel.last_length(ids),
        D=D,
        BR=BR,
        BD=BD,
        num_warps=4,
    )
    token_ids.launched()
    return y
