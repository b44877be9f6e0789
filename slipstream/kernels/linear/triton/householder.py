"""Rows of tokens among those of their n steps, and back.

    y[t n + i] = x[t] if i = at else 0            x[t] = y[t n + at]

A token has `heads` rows of W elements: H of q, HV of do, and HV of one number of g.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.linear.triton.scalar_decay.tiles import power_of_two
from slipstream.runtime import backends, launch_cache

ROWS = 1024  # of a program, at most


@triton.jit
def _rows(block, heads, n, BR: tl.constexpr):
    """A program's rows of x, and rows of y at their tokens' first steps; rows of 64 bits are
    divided by heads once."""
    first = tl.cast(block, tl.int64) * BR
    token = first // heads
    o_h = (first - token * heads).to(tl.int32) + tl.arange(0, BR)
    o_t = o_h // heads
    return first + tl.arange(0, BR), (token + o_t) * n * heads + (o_h - o_t * heads)


@triton.jit
def _move(
    x_ptr, y_ptr, block, tokens, heads, n, at,
    W: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    o_x, o_y = _rows(block, heads, n, BR)
    o_w = tl.arange(0, BW)
    m = (o_x < tl.cast(tokens, tl.int64) * heads)[:, None] & (o_w < W)[None, :]
    p_x = x_ptr + o_x[:, None] * W + o_w[None, :]
    if BACK:
        b_y = tl.load(y_ptr + (o_y + at * heads)[:, None] * W + o_w[None, :], mask=m, other=0.0)
        tl.store(p_x, b_y, mask=m)
    else:
        b_x = tl.load(p_x, mask=m, other=0.0)
        for i in range(n):
            b_y = tl.where(i == at, b_x, tl.zeros_like(b_x))
            tl.store(y_ptr + (o_y + i * heads)[:, None] * W + o_w[None, :], b_y, mask=m)


@triton.jit(do_not_specialize=["blocks", "before", "tokens", "H", "HV", "n"])
def householder_kernel(
    q_ptr,  # [tokens, H, K]
    g_ptr,  # [tokens, HV], or None
    do_ptr,  # [tokens, HV, V], or None
    qs_ptr,  # [tokens * n, H, K]
    gs_ptr,  # [tokens * n, HV]
    dos_ptr,  # [tokens * n, HV, V]
    blocks, before, tokens, H, HV, n,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
    BD: tl.constexpr, BG: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """grid: `blocks` = ceil(tokens * H / BR) programs for q, then up to `before` ceil(tokens * HV /
    BG) for g, then ceil(tokens * HV / BD) for do. BACK: writes q, g and do."""
    pid = tl.program_id(0)
    if pid < blocks:
        _move(q_ptr, qs_ptr, pid, tokens, H, n, n - 1, K, BK, BR, BACK)
    elif pid < before:
        if g_ptr is not None:
            _move(g_ptr, gs_ptr, pid - blocks, tokens, HV, n, 0, 1, 1, BG, BACK)
    elif do_ptr is not None:
        _move(do_ptr, dos_ptr, pid - before, tokens, HV, n, n - 1, V, BV, BD, BACK)


def interleave(
    q: Tensor, g: Tensor | None, do: Tensor | None, n: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q [B, T, H, K] and do [B, T, HV, V] at the last, g [B, T, HV] at the first of n steps."""
    q, g, do = q.contiguous(), *(None if x is None else x.contiguous() for x in (g, do))
    qs, gs, dos = (
        None if x is None else x.new_empty(x.shape[0], x.shape[1] * n, *x.shape[2:])
        for x in (q, g, do)
    )
    _launch(q, g, do, qs, gs, dos, n, False)
    assert qs is not None
    return qs, gs, dos


def deinterleave(q: Tensor, g: Tensor | None, n: int, to: Tensor, g_to: Tensor | None) -> None:
    """to [B, T, H, K] of q [B, T n, H, K], g_to [B, T, HV] of g [B, T n, HV]; all contiguous."""
    _launch(to, g_to, None, q, g, None, n, True)


def _launch(
    q: Tensor,
    g: Tensor | None,
    do: Tensor | None,
    qs: Tensor | None,
    gs: Tensor | None,
    dos: Tensor | None,
    n: int,
    back: bool,
) -> None:
    B, T, H, K = q.shape
    HV = g.shape[2] if g is not None else 0 if do is None else do.shape[2]
    V = 1 if do is None else do.shape[3]
    (BK, BR), (BV, BD) = _tile(K), _tile(V)
    blocks = -(-B * T * H // BR)
    before = blocks + (0 if g is None else -(-B * T * HV // ROWS))
    more = 0 if do is None else -(-B * T * HV // BD)
    launch: Any = launch_cache.cached(householder_kernel)[(before + more,)]
    with backends.device_of(q.device):
        launch(
            q_ptr=q,
            g_ptr=g,
            do_ptr=do,
            qs_ptr=qs,
            gs_ptr=gs,
            dos_ptr=dos,
            blocks=blocks,
            before=before,
            tokens=B * T,
            H=H,
            HV=HV,
            n=n,
            K=K,
            V=V,
            BK=BK,
            BV=BV,
            BR=BR,
            BD=BD,
            BG=ROWS,
            BACK=back,
            num_warps=4,
        )


def _tile(W: int) -> tuple[int, int]:
    BW = power_of_two(W)
    # 2048 elements of a program, at least a row
    return BW, min(ROWS, max(1, 2048 // BW))
