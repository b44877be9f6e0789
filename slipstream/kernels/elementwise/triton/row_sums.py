"""Sums of rows, each from the place that an index has for it.

y[to[i]] (+)= sum_j x[index[j]]          j = starts[i] .. starts[i + 1] - 1

in float32 and in one order: the same bits each run. Without starts j is i, without `to` it is
row i. Row r of [A, W, D] is that at r // W and r % W.
"""

import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime import launch_cache


@triton.jit
def _pointers(ptr, row, o_d, W, stride_a, stride_w, stride_d):
    return ptr + row // W * stride_a + row % W * stride_w + o_d * stride_d


@triton.jit(do_not_specialize=["x_rows"])
def row_sums_kernel(
    x_ptr, index_ptr, starts_ptr, to_ptr, y_ptr, x_a, x_w, x_d, y_a, y_w, y_d, x_rows, x_W, y_W, D,
    ADD: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (rows of y, blocks of D). x [A, W, D], y [A', W', D] of any strides; index int64."""
    i = tl.program_id(0).to(tl.int64)
    # rows times strides, and columns times theirs, may be more than 32 bits
    o_d = (tl.program_id(1) * BD + tl.arange(0, BD)).to(tl.int64)
    m_d = o_d < D
    begin, end, row = i, i + 1, i
    if starts_ptr is not None:
        begin, end = tl.load(starts_ptr + i), tl.load(starts_ptr + i + 1)
    if to_ptr is not None:
        row = tl.load(to_ptr + i)
    p_y = _pointers(y_ptr, row, o_d, y_W, y_a, y_w, y_d)
    b_y = tl.zeros([BD], tl.float32)
    if ADD:
        b_y += tl.load(p_y, mask=m_d, other=0.0).to(tl.float32)
    # several at once: one after the other each would wait for memory
    for j in range(begin, end, BJ):
        o_j = j + tl.arange(0, BJ)
        x_row = tl.load(index_ptr + o_j, mask=o_j < end, other=-1)[:, None]
        # an index below 0 is a row of zeros
        live = m_d[None, :] & (x_row >= 0) & (x_row < x_rows)
        p_x = _pointers(x_ptr, x_row, o_d[None, :], x_W, x_a, x_w, x_d)
        b_y += tl.sum(tl.load(p_x, mask=live, other=0.0).to(tl.float32), 0)
    tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=m_d)


def row_sums(
    x: Tensor, index: Tensor, starts: Tensor | None, to: Tensor | None, y: Tensor, add: bool
) -> None:
    """x [A, W, D], index [M], starts [N + 1], to [N]; y [A', W', D] is written."""
    rows = y.shape[0] * y.shape[1] if to is None else to.shape[0]
    D = y.shape[2]
    # a thread has 8 numbers, of sums 16
    BJ, columns = (1, 1024) if starts is None else (8, 256)
    BD = min(columns, triton.next_power_of_2(D))
    launch_cache.cached(row_sums_kernel)[(rows, -(-D // BD))](
        x_ptr=x,
        index_ptr=index,
        starts_ptr=starts,
        to_ptr=to,
        y_ptr=y,
        **dict(zip(("x_a", "x_w", "x_d"), x.stride())),
        **dict(zip(("y_a", "y_w", "y_d"), y.stride())),
        x_rows=x.shape[0] * x.shape[1],
        x_W=x.shape[1],
        y_W=y.shape[1],
        D=D,
        ADD=add,
        BJ=BJ,
        BD=BD,
        num_warps=4,
    )
