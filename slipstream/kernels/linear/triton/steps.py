# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Rows of tokens among those of their n steps, and back.

    y[t n + i] = x[t] if i = at else 0            x[t] = y[t n + at]

A token has `heads` rows of W elements: H of q, and HV of one number of g.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.kept import kept
from slipstream.kernels.launching import on
from slipstream.kernels.linear.triton.tiles import power_of_two

# Elements of a program, at least a row; and rows at most.
BLOCK, ROWS = 2048, 1024


@triton.jit
def _spread(
    x_ptr, y_ptr, block, tokens, heads, n, at, W: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr
):
    o_r = tl.cast(block, tl.int64) * BR + tl.arange(0, BR)
    o_w = tl.arange(0, BW)
    m = (o_r < tl.cast(tokens, tl.int64) * heads)[:, None] & (o_w < W)[None, :]
    b_x = tl.load(x_ptr + o_r[:, None] * W + o_w[None, :], mask=m, other=0.0)
    o_r = o_r // heads * (n * heads) + o_r % heads
    for i in range(n):
        b_y = tl.where(i == at, b_x, tl.zeros_like(b_x))
        tl.store(y_ptr + (o_r + i * heads)[:, None] * W + o_w[None, :], b_y, mask=m)


@triton.jit(do_not_specialize=["blocks", "tokens", "H", "HV", "n"])
def steps_spread_kernel(
    q_ptr,  # [tokens, H, K]
    g_ptr,  # [tokens, HV], or None
    qs_ptr,  # [tokens * n, H, K]
    gs_ptr,  # [tokens * n, HV]
    blocks,
    tokens,
    H,
    HV,
    n,
    K: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    BG: tl.constexpr,
):
    """grid (blocks + ceil(tokens * HV / BG),): blocks = ceil(tokens * H / BR) for q."""
    pid = tl.program_id(0)
    if pid < blocks:
        _spread(q_ptr, qs_ptr, pid, tokens, H, n, n - 1, K, BK, BR)
    elif g_ptr is not None:
        _spread(g_ptr, gs_ptr, pid - blocks, tokens, HV, n, 0, 1, 1, BG)


@triton.jit(do_not_specialize=["tokens", "heads", "n", "at"])
def steps_take_kernel(
    y_ptr,  # [tokens * n, heads, W]
    x_ptr,  # [tokens, heads, W]
    tokens,
    heads,
    n,
    at,
    W: tl.constexpr,
    BW: tl.constexpr,
    BR: tl.constexpr,
):
    """grid (ceil(tokens * heads / BR),)."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_w = tl.arange(0, BW)
    m = (o_r < tl.cast(tokens, tl.int64) * heads)[:, None] & (o_w < W)[None, :]
    o_y = o_r // heads * (n * heads) + at * heads + o_r % heads
    b_x = tl.load(y_ptr + o_y[:, None] * W + o_w[None, :], mask=m, other=0.0)
    tl.store(x_ptr + o_r[:, None] * W + o_w[None, :], b_x, mask=m)


def spread(q: Tensor, g: Tensor | None, n: int) -> tuple[Tensor, Tensor | None]:
    """q [B, T, H, K] at the last and g [B, T, HV] at the first of n steps, [B, T n, ...]."""
    q, g = q.contiguous(), None if g is None else g.contiguous()
    (B, T, H, K), HV = q.shape, 0 if g is None else g.shape[2]
    qs = q.new_empty(B, T * n, H, K)
    gs = None if g is None else g.new_empty(B, T * n, HV)
    BK, BR = _tile(K)
    blocks, more = -(-B * T * H // BR), -(-B * T * HV // ROWS)
    launch: Any = kept(steps_spread_kernel)[(blocks + more,)]
    with on(q.device):
        launch(
            q, g, qs, gs, blocks, B * T, H, HV, n,
            K=K, BK=BK, BR=BR, BG=ROWS, num_warps=4,
        )  # fmt: skip
    return qs, gs


def take(y: Tensor, n: int, at: int, out: Tensor) -> None:
    """out [B, T, heads, W] or [B, T, heads] of y [B, T n, ...]; both contiguous."""
    B, T, heads = out.shape[:3]
    W = out.shape[3] if out.dim() == 4 else 1
    BW, BR = _tile(W)
    launch: Any = kept(steps_take_kernel)[(-(-B * T * heads // BR),)]
    with on(y.device):
        launch(y, out, B * T, heads, n, at, W=W, BW=BW, BR=BR, num_warps=4)


def _tile(W: int) -> tuple[int, int]:
    BW = power_of_two(W)
    return BW, min(ROWS, max(1, BLOCK // BW))
