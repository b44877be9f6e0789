"""Attention of all heads to one cache of latents, keys and values at once (MLA, absorbed).

A row of the cache is [c, r] with c [R], r [P]; x_s = q_c . c_s + q_r . r_s, o = sum_s p_s c_s:

    m' = max(m, max_s x_s)     l' = e^(m - m') l + sum_s e^(x_s - m')     o' likewise with c_s

A tile of c is loaded once and is operand of both products. Each program takes a share of the keys;
decode.py's second kernel joins them. The launch says into how many shares keys are cut, and takes
sm90/decode_latent.py where that takes a call.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.attention.triton import decode_launch, scores
from slipstream.kernels.attention.triton import tiles as tiling
from slipstream.runtime import backends, launch_cache

_SIZES = ["T", "H", "B", "tiles", "splits", "capacity", "cache_rows", "stride_table"]
_STRIDES = ["stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt"]


@triton.jit(do_not_specialize=["factor", *_SIZES, *_STRIDES])
def softmax_latent_decode_kernel(
    q_ptr,  # [B, T, H, R + P] by strides, which are in units of UNIT elements
    k_ptr,  # [N, S, R + P], or pages [M, PAGE, R + P], by strides
    o_ptr,  # [shares, B, T, H, R]
    lse_ptr,  # [shares, B, H, T], in base 2
    lengths_ptr,  # [B]
    table_ptr,  # [B, pages]
    factor, T, H, B, tiles, splits, capacity, cache_rows, stride_table, stride_qb, stride_qt,
    stride_qh, stride_kb, stride_kt,
    R: tl.constexpr, P: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """grid (tiles * shares * B,): row r of a sequence's tiles is query r / H of head r % H."""
    pid = tl.program_id(0)
    tile = pid % tiles
    i_s = pid // tiles % splits
    i_b = (pid // tiles // splits).to(tl.int64)
    keys = capacity
    if HAS_LENGTHS:
        keys = tl.minimum(tl.load(lengths_ptr + i_b).to(tl.int32), capacity)
    o_m = tile * BM + tl.arange(0, BM)
    o_n = tl.arange(0, BN)
    o_r = tl.arange(0, BR)
    o_p = tl.arange(0, BP)
    o_t = o_m // H
    b_h = o_m % H
    m_m = o_m < T * H
    stride_kt *= UNIT
    stride_kb = stride_kb.to(tl.int64) * UNIT
    p_q = q_ptr + (i_b * stride_qb + b_h * stride_qh + o_t.to(tl.int64) * stride_qt) * UNIT
    b_q = tl.load(p_q[:, None] + o_r[None, :], mask=m_m[:, None] & (o_r < R)[None, :], other=0.0)
    p_q += R
    # the rotary part of q
    b_qr = tl.load(p_q[:, None] + o_p[None, :], mask=m_m[:, None] & (o_p < P)[None, :], other=0.0)
    p_table = table_ptr
    if PAGE == 0:
        k_ptr += i_b * stride_kb
    else:
        p_table += i_b * stride_table
    # each query sees the keys before `high`
    high = keys - T + 1 + o_t
    end = tl.minimum(keys - T + 1 + (tile * BM + BM - 1) // H, keys)
    # this program's split, in whole tiles
    split_keys = tl.cdiv(tl.cdiv(tl.maximum(end, 0), BN), splits) * BN
    low = i_s * split_keys
    end = tl.minimum(low + split_keys, end)

    b_m = tl.full((BM,), float("-inf"), tl.float32)
    b_l = tl.zeros((BM,), tl.float32)
    b_o = tl.zeros((BM, BR), tl.float32)
    for i in range(tl.cdiv(end - low, BN)):
        j = low + i * BN
        at = j + o_n
        m_n = at < keys
        if PAGE == 0:
            row = at.to(tl.int64) * stride_kt
        else:
            b_page = tl.load(p_table + at // PAGE, mask=m_n, other=0).to(tl.int64)
            row = b_page * stride_kb + (at % PAGE) * stride_kt
            # missing pages are read as zeros: a mask of the scores would not fit into registers
            m_n &= (b_page >= 0) & (b_page < cache_rows)
        p_k = k_ptr + row[:, None]
        b_c = tl.load(p_k + o_r[None, :], mask=m_n[:, None] & (o_r < R)[None, :], other=0.0)
        b_r = tl.load(p_k + R + o_p[None, :], mask=m_n[:, None] & (o_p < P)[None, :], other=0.0)
        # one tile of latents is key and value
        b_s = tl.dot(b_q, tl.trans(b_c), input_precision=PRECISION)  # [BM, BN]
        b_s = tl.dot(b_qr, tl.trans(b_r), b_s, input_precision=PRECISION)
        b_s = tl.where(at[None, :] < high[:, None], b_s, float("-inf"))
        b_top = tl.maximum(b_m, tl.max(b_s, 1) * factor)
        b_base = scores.finite(b_top)
        b_p = tl.exp2(b_s * factor - b_base[:, None])
        b_shrink = tl.exp2(b_m - b_base)
        b_m = b_top
        b_l = b_l * b_shrink + tl.sum(b_p, 1)
        b_o *= b_shrink[:, None]
        b_o = tl.dot(b_p.to(b_c.dtype), b_c, b_o, input_precision=PRECISION)  # [BM, BR]

    has_no_key = b_l == 0.0
    b_l = tl.where(has_no_key, 1.0, b_l)
    b_o *= (1.0 / b_l)[:, None]
    b_lse = tl.where(has_no_key, float("-inf"), b_m + tl.log2(b_l))
    row = ((i_s * B + i_b) * T + o_t) * H + b_h
    m_o = m_m[:, None] & (o_r < R)[None, :]
    tl.store(o_ptr + row[:, None] * R + o_r[None, :], b_o, mask=m_o)
    tl.store(lse_ptr + ((i_s * B + i_b) * H + b_h) * T + o_t, b_lse, mask=m_m)


@launch_cache.cache
def tile_of(device: torch.device) -> tiling.Tile:
    if backends.INTERPRETED:
        return tiling.LATENT["interpreter"]
    of = tiling.family(torch.cuda.get_device_capability(device), hip=bool(torch.version.hip))
    return tiling.LATENT[of]


def decode(
    q: Tensor,
    latent: Tensor,
    lengths: Tensor | None,
    table: Tensor | None,
    width: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, width] in q's dtype and lse [B, H, T], float32."""
    B, T, H, _ = q.shape
    size = latent.shape[1]
    capacity = size if table is None else size * table.shape[1]
    tile = tile_of(q.device)
    tiles = -(-T * H // tile.BM)
    splits = decode_launch.choose_splits(q.device, tiles * B, capacity, tile.BN, 1)
    partial_o = torch.empty(splits, B, T, H, width, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(splits, B, H, T, dtype=torch.float32, device=q.device)
    common = {
        "o_ptr": partial_o,
        "lse_ptr": partial_lse,
        "lengths_ptr": lengths,
        "table_ptr": table,
        "factor": tiling.LOG2E * scale,
        "T": T,
        "H": H,
        "B": B,
        "tiles": tiles,
        "splits": splits,
        "capacity": capacity,
        "stride_table": 0 if table is None else table.stride(0),
        "PAGE": 0 if table is None else size,
        "HAS_LENGTHS": lengths is not None,
    }
    launch = _launch_triton
    if _uses_sm90(q, latent, width, table):
        from slipstream.kernels.attention.sm90.launch import launch_latent as launch
    with tiling.device_of(q.device):
        launch(q, latent, (tiles * splits * B,), common)
        return decode_launch.combine(partial_o, partial_lse, q, None, 1 << (width - 1).bit_length())


def _uses_sm90(q: Tensor, latent: Tensor, width: int, table: Tensor | None) -> bool:
    if backends.sm90_unsupported(q):
        return False
    from slipstream.kernels.attention.sm90.launch import takes_latent

    return takes_latent(q, latent, width, table)


def _launch_triton(q: Tensor, latent: Tensor, grid: tuple[int], common: dict[str, Any]) -> None:
    D, width, tile = q.shape[-1], common["o_ptr"].shape[-1], tile_of(q.device)
    narrowest = 16 if tile.BM < 64 else 64
    q, latent = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, latent))
    strides = [*q.stride()[:3], *latent.stride()[:2]]
    unit = math.gcd(16 // q.element_size(), *strides)
    launch_cache.cached(softmax_latent_decode_kernel)[grid](
        q_ptr=q,
        k_ptr=latent,
        **common,
        cache_rows=latent.shape[0],
        **{name: stride // unit for name, stride in zip(tiling.STRIDES, strides)},
        R=width,
        P=D - width,
        BR=max(narrowest, 1 << (width - 1).bit_length()),
        BP=max(narrowest, 1 << (D - width - 1).bit_length()),
        BM=tile.BM,
        BN=tile.BN,
        UNIT=unit,
        PRECISION=tiling.fp32_dot_precision(),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
