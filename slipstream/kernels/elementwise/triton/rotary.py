"""Rotary embedding: one read and one write, of any strides but the last.

    y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin        backward with -sin

cos and sin are rows of tables, found by position. Of one outside of the table the nearest row is
taken, and it is reported (runtime/token_ids.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime import launch_cache
from slipstream.runtime.token_ids import NAMES, SLOTS, launched, slots_for
from slipstream.runtime.token_ids_kernel import report


@triton.jit(do_not_specialize=["T", "S", "stride_cos", "stride_position"])
def rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, position_ptr, y_ptr, records_ptr,
    stride_b, stride_t, stride_h, stride_y, stride_cos, stride_position, T, S,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, BP: tl.constexpr,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr, RECORDS: tl.constexpr, NAME: tl.constexpr,
):  # fmt: skip
    """Grid (B T, H / BH). x [B, T, H, D], y the same, a token's heads in a row, the tokens evenly
    spaced; cos, sin [S, HALF], or [B or 1, T, HALF] without position [B or 1, T]."""
    i_b, i_t = (tl.program_id(0) // T).to(tl.int64), (tl.program_id(0) % T).to(tl.int64)
    o_h = (tl.program_id(1) * BH + tl.arange(0, BH))[:, None]
    o_p = tl.arange(0, BP)
    p_table = i_b * stride_cos + i_t * HALF
    if position_ptr is not None:
        i_position = i_b * stride_position + i_t
        position = tl.load(position_ptr + i_position).to(tl.int64)
        if ((position < 0) | (position >= S)) & (tl.program_id(1) == 0):
            # a record that several programs write holds one wrong position or parts of two
            report(records_ptr, tl.program_id(0) % RECORDS, i_position, position_ptr, S, T, NAME)
        # never past the tables, whatever the position: the error comes with a later call
        p_table = tl.minimum(tl.maximum(position, 0), S - 1) * HALF
    # one row of the tables for all heads of the token
    b_cos = tl.load(cos_ptr + p_table + o_p, mask=o_p < HALF, other=0.0).to(tl.float32)[None, :]
    b_sin = tl.load(sin_ptr + p_table + o_p, mask=o_p < HALF, other=0.0).to(tl.float32)[None, :]
    if BACK:
        b_sin = -b_sin
    p_x = x_ptr + i_b * stride_b + i_t * stride_t + o_h * stride_h
    p_y = y_ptr + tl.program_id(0).to(tl.int64) * stride_y + o_h * D
    # pairs (2i, 2i + 1) are split from one wide load; halves are two loads
    if INTERLEAVED:
        o = tl.arange(0, 2 * BP)[None, :]
        m = (o_h < H) & (o < 2 * HALF)
        b_x = tl.load(p_x + o, mask=m, other=0.0).to(tl.float32)
        b_1, b_2 = tl.split(tl.reshape(b_x, (BH, BP, 2)))
        b_y = tl.join(b_1 * b_cos - b_2 * b_sin, b_2 * b_cos + b_1 * b_sin)
        b_y = tl.reshape(b_y, (BH, 2 * BP))
        tl.store(p_y + o, b_y.to(y_ptr.dtype.element_ty), mask=m)
    else:
        o = o_p[None, :]
        m = (o_h < H) & (o < HALF)
        b_1 = tl.load(p_x + o, mask=m, other=0.0).to(tl.float32)
        b_2 = tl.load(p_x + HALF + o, mask=m, other=0.0).to(tl.float32)
        b_y = b_1 * b_cos - b_2 * b_sin
        tl.store(p_y + o, b_y.to(y_ptr.dtype.element_ty), mask=m)
        b_y = b_2 * b_cos + b_1 * b_sin
        tl.store(p_y + HALF + o, b_y.to(y_ptr.dtype.element_ty), mask=m)
    # features that are not rotated
    for c in range(2 * HALF, D, BP):
        o_tail = c + o_p[None, :]
        m_tail = (o_h < H) & (o_tail < D)
        b_tail = tl.load(p_x + o_tail, mask=m_tail, other=0.0)
        tl.store(p_y + o_tail, b_tail, mask=m_tail)


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    back: bool,
    out: Tensor | None = None,
) -> Tensor:
    """As rotary_kernel; positions [1 or B, T]. out: y, heads of a wider contiguous tensor."""
    B, T, H, D = x.shape
    HALF = cos.shape[-1]
    if x.stride(-1) != 1:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    positions = None if positions is None else positions.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    BP = 1 << (HALF - 1).bit_length()
    # 2048 pairs, those of several heads
    BH = max(min(1 << (H - 1).bit_length(), 2048 // BP), 1)
    stride_cos = cos.stride(0) if cos.dim() == 3 and cos.shape[0] > 1 else 0
    stride_position = T if positions is not None and positions.shape[0] > 1 else 0
    launch_cache.cached(rotary_kernel)[(B * T, -(-H // BH))](
        x_ptr=x,
        cos_ptr=cos,
        sin_ptr=sin,
        position_ptr=positions,
        y_ptr=y,
        records_ptr=None if positions is None else slots_for(positions),
        **dict(zip(("stride_b", "stride_t", "stride_h"), x.stride())),
        stride_y=y.stride(1),
        stride_cos=stride_cos,
        stride_position=stride_position,
        T=T,
        S=cos.shape[0],
        H=H,
        D=D,
        HALF=HALF,
        BH=BH,
        BP=BP,
        INTERLEAVED=interleaved,
        BACK=back,
        RECORDS=SLOTS,
        NAME=NAMES.index("positions"),
        num_warps=4,
    )
    launched()
    return y


def join_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of qkv, side by side from those of queries and keys, which are rotated back, and
    of values; cos, sin [B or 1, T, R/2]."""
    sizes = [x.shape[2] for x in (dq, dk, dv)]
    dqkv = dq.new_empty(*dq.shape[:2], sum(sizes), dq.shape[3])
    *rotated, last = dqkv.split(sizes, 2)
    for dx, dy in zip(rotated, (dq, dk)):
        rotate(dy, cos, sin, None, False, True, dx)
    _copy(last, dv)
    return dqkv


def _copy(x: Tensor, y: Tensor) -> None:
    """x.copy_(y), by words of 8 bytes: torch's own copy of 2 at a time reaches half of the
    memory's bandwidth."""
    each = 8 // x.element_size()
    even = not any(n % each for t in (x, y) for n in (*t.stride()[:-1], t.storage_offset()))
    if even and x.shape[-1] % each == 0 and x.stride(-1) == y.stride(-1) == 1:
        x, y = x.view(torch.int64), y.view(torch.int64)
    x.copy_(y)
