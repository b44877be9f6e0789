"""Attention to selected keys in plain torch, 32 queries of a list's heads at a time.

On the CPU the keys that any of the queries sees are gathered, each once; elsewhere, where that
would wait for the device, all keys are under the mask. With p, lse, delta and dx as in eager.py.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention import reference
from slipstream.kernels.selected_attention.inputs import SelectedInputs, SelectedOptions, visible


class Tile(NamedTuple):
    """Queries of one list, with R heads for each of the kv heads, and the keys that they look at.

    rows, heads, kv_heads, keys: indices of what they are in all queries, heads and keys.
    """

    b: int
    rows: slice
    heads: slice
    kv_heads: slice
    keys: Tensor | slice
    q: Tensor  # [kv heads, R * rows, D]
    k: Tensor  # [kv heads, keys, D]
    v: Tensor  # [kv heads, keys, DV]
    seen: Tensor  # [rows, keys]


def forward(inputs: SelectedInputs, options: SelectedOptions) -> tuple[Tensor, Tensor]:
    """o [B, T, H, DV] in q's dtype and lse [B, H, T], float32 or float64."""
    q, sinks, wide = inputs.q, inputs.sinks, inputs.dense.dtype
    B, T, H, _ = q.shape
    o, lse = q.new_zeros(B, T, H, inputs.v.shape[-1]), q.new_empty(B, H, T, dtype=wide)
    for tile in _tiles(inputs, options):
        x = _scores(tile, options)
        if sinks is not None:
            sink = sinks[tile.heads].to(wide)[:, None, None]
            x = torch.cat([x, sink.expand(*x.shape[:2], 1)], -1)
        total = x.logsumexp(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -torch.inf)
        p = (x - _finite(total)[..., None]).exp_()[..., : tile.k.shape[1]]
        o[tile.b, tile.rows, tile.heads] = (
            _heads(_grouped(p, tile) @ tile.v, tile).transpose(0, 1).to(o.dtype)
        )
        lse[tile.b, tile.heads, tile.rows] = total
    return o, lse


def backward(
    inputs: SelectedInputs,
    o: Tensor,
    lse: Tensor,
    do: Tensor | None,
    dlse: Tensor | None,
    options: SelectedOptions,
) -> list[Tensor]:
    """Gradients of q, k, v, and of sinks if there are any."""
    q, k, v, wide = *inputs[:3], inputs.dense.dtype
    do = torch.zeros_like(o) if do is None else do
    delta = torch.einsum("bthv,bthv->bht", do.to(wide), o.to(wide))
    delta = delta if dlse is None else delta - dlse.to(wide)
    dq = q.new_zeros(q.shape)
    placed = reference.placed_keys(inputs.dense)[:2]
    dk, dv = (x.new_zeros(x.shape, dtype=wide) for x in placed)
    for tile in _tiles(inputs, options):
        at = tile.b, tile.heads, tile.rows
        x = _scores(tile, options)
        p = (x - _finite(lse[at].to(wide))[..., None]).exp_()
        b_do = do[tile.b, tile.rows, tile.heads].to(wide).transpose(0, 1)
        b_do = b_do.reshape(tile.q.shape[0], -1, v.shape[-1])
        dx = p * (_heads(b_do @ tile.v.mT, tile) - delta[at][..., None])
        dx, p = _grouped(dx, tile) * options.scale, _grouped(p, tile)
        dq[tile.b, tile.rows, tile.heads] = _heads(dx @ tile.k, tile).transpose(0, 1).to(dq.dtype)
        b = tile.b if dk.shape[0] > 1 else 0
        # no key is there twice: what is added to each follows the order of the tiles
        dk[b, tile.keys, tile.kv_heads] += (dx.mT @ tile.q).transpose(0, 1)
        dv[b, tile.keys, tile.kv_heads] += (p.mT @ b_do).transpose(0, 1)
    grads = [dq, dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype)]
    if inputs.sinks is not None:
        p = (inputs.sinks.to(wide)[:, None] - _finite(lse.to(wide))).exp()
        p = p.masked_fill(lse == -torch.inf, 0.0)
        grads.append(-(p * delta).sum((0, 2)).to(inputs.sinks.dtype))
    return grads


def _tiles(inputs: SelectedInputs, options: SelectedOptions) -> Iterator[Tile]:
    q, selected, wide = inputs.q, inputs.selected, inputs.dense.dtype
    (B, T, H, _), G = q.shape, selected.shape[2]
    k, v, _, where = reference.placed_keys(inputs.dense)
    if inputs.lengths is not None:  # what is not in use may be NaN
        unused = (where.k_sequence < 0)[..., None, None]
        k, v = k.masked_fill(unused, 0), v.masked_fill(unused, 0)
    HKV = k.shape[2]
    kv = 0 if inputs.sequences == 0 else max(HKV // G, 1)
    for b in range(B if kv else 0):
        # of packed sequences the positions have one row
        near = [x[min(b, x.shape[0] - 1)][None] for x in where]
        all_k, all_v = (x[min(b, x.shape[0] - 1)] for x in (k, v))
        for begin in range(0, T, 32):
            rows = slice(begin, min(begin + 32, T))
            near_rows = reference.Positions(*(x[:, rows] for x in near[:3]), *near[3:])
            seen = visible(near_rows, selected[b : b + 1, rows], inputs.k.shape[1], options)[0]
            for g in range(G):
                heads = slice(g * H // G, (g + 1) * H // G)
                first = g * HKV // G
                kv_heads = slice(first, first + kv)
                b_seen, keys = seen[:, g], slice(None)
                if q.is_cpu:
                    keys = b_seen.any(0).nonzero()[:, 0]
                    b_seen = b_seen[:, keys]
                b_k, b_v = (x[keys, kv_heads].to(wide).transpose(0, 1) for x in (all_k, all_v))
                b_q = q[b, rows, heads].to(wide).transpose(0, 1).reshape(kv, -1, q.shape[-1])
                yield Tile(b, rows, heads, kv_heads, keys, b_q, b_k, b_v, b_seen)


def _scores(tile: Tile, options: SelectedOptions) -> Tensor:
    """[heads, rows, keys], -inf where nothing is seen."""
    x = _heads(tile.q @ tile.k.mT, tile) * options.scale
    return x.masked_fill_(~tile.seen, -torch.inf)


def _heads(x: Tensor, tile: Tile) -> Tensor:
    """[kv heads, R * rows, X] -> [heads, rows, X]"""
    return x.unflatten(1, (-1, tile.seen.shape[0])).flatten(0, 1)


def _grouped(x: Tensor, tile: Tile) -> Tensor:
    """Its inverse."""
    return x.reshape(*tile.q.shape[:2], x.shape[-1])


def _finite(lse: Tensor) -> Tensor:
    """0 for -inf: a query that sees nothing has no x above -inf to compare."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
