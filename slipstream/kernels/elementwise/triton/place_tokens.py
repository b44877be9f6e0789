"""A token of each row into that row's block: one read and one write of each number.

y[n, counts[n]] = x[n]          of up to six tensors
"""

import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime import backends, launch_cache


@triton.jit
def _place(x_ptr, y_ptr, stride, D, n, t, T, o):
    if x_ptr is not None:
        b_x = tl.load(x_ptr + n * stride + o, mask=o < D, other=0)
        # a count outside of the block writes nothing: its row has no place
        tl.store(y_ptr + (n * T + t) * D + o, b_x, mask=(o < D) & (t >= 0) & (t < T))


@triton.jit
def place_tokens_kernel(
    x0_ptr, x1_ptr, x2_ptr, x3_ptr, x4_ptr, x5_ptr,
    y0_ptr, y1_ptr, y2_ptr, y3_ptr, y4_ptr, y5_ptr, counts_ptr,
    stride0, stride1, stride2, stride3, stride4, stride5, D0, D1, D2, D3, D4, D5,
    T: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BD columns, N). x_i [N, D_i], y_i [N, T, D_i], counts [N]."""
    # rows times tokens times columns may be more than 32 bits
    n = tl.program_id(1).to(tl.int64)
    t = tl.load(counts_ptr + n).to(tl.int64)
    o = tl.program_id(0) * BD + tl.arange(0, BD)
    _place(x0_ptr, y0_ptr, stride0, D0, n, t, T, o)
    _place(x1_ptr, y1_ptr, stride1, D1, n, t, T, o)
    _place(x2_ptr, y2_ptr, stride2, D2, n, t, T, o)
    _place(x3_ptr, y3_ptr, stride3, D3, n, t, T, o)
    _place(x4_ptr, y4_ptr, stride4, D4, n, t, T, o)
    _place(x5_ptr, y5_ptr, stride5, D5, n, t, T, o)


def place_tokens(counts: Tensor, *tensors: Tensor | None) -> None:
    """[N, D_i] with any stride of rows, then [N, T, D_i], contiguous; None for those missing."""
    xs, ys = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
    widths = [0 if x is None else x.shape[1] for x in xs]
    strides = [0 if x is None else x.stride(0) for x in xs]
    assert ys[0] is not None
    N, T = ys[0].shape[:2]
    if N > backends.GRID_ROWS:
        for rows in backends.row_parts(N, counts, *tensors):
            place_tokens(*rows)
        return
    BD = min(1024, triton.next_power_of_2(max(widths)))
    launch_cache.cached(place_tokens_kernel)[(-(-max(widths) // BD), N)](
        **{f"x{i}_ptr": x for i, x in enumerate(xs)},
        **{f"y{i}_ptr": y for i, y in enumerate(ys)},
        counts_ptr=counts,
        **{f"stride{i}": n for i, n in enumerate(strides)},
        **{f"D{i}": n for i, n in enumerate(widths)},
        T=T,
        BD=BD,
        num_warps=4,
    )
