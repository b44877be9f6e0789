"""Softmax attention in plain torch: torch's own where it does it, else by blocks of queries.

A block of ROWS queries meets all the keys that it sees at once, so there is no running softmax and
memory is linear in T. With x, p, lse and o as in reference.py and incoming do, dlse,

    dp_ts = do_t . v_s        dx_ts = p_ts (dp_ts - delta_t)        delta_t = do_t . o_t - dlse_t

and through the softcap dx (1 - tanh^2); MATH.md has the rest. On the CPU each sequence is worked on
by itself; elsewhere, where offsets cannot be read, all keys meet every block under a mask.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.attention import dropout
from slipstream.kernels.attention.inputs import (
    MIN_GATE,
    AttentionInputs,
    AttentionOptions,
    Slices,
    slice_sequences,
)
from slipstream.kernels.attention.reference import (
    Positions,
    distance,
    flat_keys,
    positions,
    sequence_slopes,
    take,
    visible,
)

ROWS = 128


def torch_takes(terms: AttentionInputs, options: AttentionOptions) -> bool:
    """Whether scaled_dot_product_attention does it in linear memory and returns all there is."""
    left, right = options.left, options.right
    q, k, v = terms[:3]
    if any(x is not None for x in terms[3:6]) or options.softcap or options.dropout:
        return False
    if q.shape[-1] != v.shape[-1]:
        return False
    if terms.simple and (left < 0 or left >= k.shape[1] - 1) and k.shape[1] > 0:
        # the only query, standing on the last key, sees all that is left to it
        return right < 0 or (right == 0 and q.shape[1] in (1, k.shape[1]))
    alike = terms.cu_q is not None and terms.cu_q is terms.cu_k and terms.lengths is None
    return alike and terms.sequences > 0 and left < 0 and right <= 0 and _readable(q)


def with_torch(terms: AttentionInputs, options: AttentionOptions) -> Tensor:
    """o of a call that torch takes, with torch's gradients."""
    q, k, v = terms[:3]
    if terms.cu_q is None:
        causal = options.right == 0 and q.shape[1] > 1
        return _sdpa(q, k, v, options.scale, causal)
    parts = [
        _sdpa(q[:, a:b], k[:, a:b], v[:, a:b], options.scale, options.right == 0)
        for a, b in pairwise(terms.cu_q.tolist())
    ]
    return torch.cat(parts, dim=1)


def _readable(q: Tensor) -> bool:
    return q.device.type == "cpu" and not torch.compiler.is_compiling()


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    # branched on, not passed on: under torch.compile torch refuses the symbolic comparison
    grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, **grouped)
    return o.transpose(1, 2)


class AttentionBlock(NamedTuple):
    """Queries and the keys that they all look at, wide; R = H / HKV.

    bounded: query t stands on key S - T + t, which bounds what a block of them sees.
    sequence: what the first of its sequences is of all.
    """

    q: Tensor  # [B, HKV, R, T, D]
    k: Tensor  # [B, HKV, S, D]
    v: Tensor  # [B, HKV, S, DV]
    G: Tensor | None  # [B, H, S], float64: sums of g
    sinks: Tensor | None  # [H]
    slopes: Tensor | None  # [H] or [N, H]
    where: Positions
    bounded: bool
    sequence: int


def forward(
    terms: AttentionInputs, options: AttentionOptions, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, DV] in q's dtype and lse [B, H, T], float32 or float64.

    Args:
        hidden: bool [B, S], keys that no query sees, where neither queries nor keys are packed.
    """
    (B, T, H, _), DV = terms.q.shape, terms.v.shape[-1]
    o = terms.q.new_empty(B, T, H, DV)
    lse = terms.q.new_empty(B, H, T, dtype=terms.dtype)
    for part, (qb, q_rows, kb, k_rows) in _attention_blocks(terms):
        if hidden is not None:
            part = _hide(part, hidden[kb, k_rows])
        o_part, lse_part = o[qb, q_rows], lse[qb, :, q_rows]
        for rows, keys in _blocks(part, options):
            x, _ = _scores(part, rows, keys, options)
            if part.sinks is not None:
                x = torch.cat([x, part.sinks[:, None, None].expand(*x.shape[:-1], 1)], -1)
            total = x.logsumexp(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -torch.inf)
            p = (x - _finite(total)[..., None]).exp_()[..., : keys.stop - keys.start]
            if terms.seed is not None:
                p *= _dropout_factor(p, part, rows, keys, options, terms.seed)
            y = _grouped(p, part) @ part.v[:, :, keys]
            o_part[:, rows] = _heads(y, part).transpose(1, 2).to(o.dtype)
            lse_part[:, :, rows] = total
    return o, lse


def backward(
    terms: AttentionInputs,
    options: AttentionOptions,
    o: Tensor,
    lse: Tensor,
    do: Tensor | None,
    dlse: Tensor | None,
) -> dict[str, Tensor]:
    """Gradients by the name of the term, in its shape and dtype."""
    grads = {n: x.new_zeros(x.shape, dtype=terms.dtype) for n, x in zip("qkv", terms[:3])}
    if terms.g is not None:
        grads["g"] = terms.g.new_zeros(terms.g.shape, dtype=torch.float64)
    if do is None:
        do = torch.zeros_like(o)
    delta = torch.einsum("bthv,bthv->bht", do.to(terms.dtype), o.to(terms.dtype))
    if dlse is not None:
        delta = delta - dlse.to(terms.dtype)
    for part, places_of in _attention_blocks(terms):
        _block_backward(part, places_of, options, lse, delta, do, grads, terms.seed)
    if terms.sinks is not None:
        p = (terms.sinks.to(terms.dtype)[:, None] - _finite(lse)).exp()
        p = p.masked_fill(lse == -torch.inf, 0.0)
        grads["sinks"] = -(p * delta).sum((0, 2))
    return {name: x.to(getattr(terms, name).dtype) for name, x in grads.items()}


def _block_backward(
    part: AttentionBlock,
    places_of: Slices,
    options: AttentionOptions,
    lse: Tensor,
    delta: Tensor,
    do: Tensor,
    grads: dict[str, Tensor],
    seed: Tensor | None,
) -> None:
    """Adds one part's gradients to `grads`."""
    qb, q_rows, kb, k_rows = places_of
    HKV, R = part.q.shape[1:3]
    lse, delta = (x[qb, :, q_rows] for x in (lse, delta))
    do = do[qb, q_rows].to(part.q.dtype).transpose(1, 2).unflatten(1, (HKV, R))
    dq = torch.empty_like(part.q)
    dk, dv = torch.zeros_like(part.k), torch.zeros_like(part.v)
    dG = None if part.G is None else torch.zeros_like(part.G)
    for rows, keys in _blocks(part, options):
        x, slope = _scores(part, rows, keys, options)
        p = (x - _finite(lse[..., rows])[..., None]).exp_()
        b_q, b_do = part.q[..., rows, :].flatten(2, 3), do[..., rows, :].flatten(2, 3)
        dp = _heads(b_do @ part.v[:, :, keys].mT, part)
        weights = p
        if seed is not None:
            factor = _dropout_factor(p, part, rows, keys, options, seed)
            weights, dp = p * factor, dp * factor
        dx = p * (dp - delta[..., rows, None])
        dv[:, :, keys] += _grouped(weights, part).mT @ b_do
        if dG is not None:
            dG[..., keys] -= dx.sum(-2)
            at = part.where.q_key[:, None, rows].expand(*dx.shape[:-1])
            dG.scatter_add_(2, at, dx.sum(-1).double())
        if slope is not None:
            dx = dx * slope
        dx = _grouped(dx, part) * options.scale
        dq[..., rows, :] = (dx @ part.k[:, :, keys]).unflatten(2, (R, -1))
        dk[:, :, keys] += dx.mT @ b_q
    grads["q"][qb, q_rows] = dq.flatten(1, 2).transpose(1, 2)
    found = {"k": dk, "v": dv}
    if dG is not None:
        found["g"] = dG.flip(2).cumsum(2).flip(2)
    for name, x in found.items():  # reshaped where all sequences' keys were one
        to = grads[name][kb, k_rows]
        to.copy_(x.transpose(1, 2).reshape(to.shape))


def _dropout_factor(
    p: Tensor,
    part: AttentionBlock,
    rows: slice,
    keys: slice,
    options: AttentionOptions,
    seed: Tensor,
) -> Tensor:
    """0 for a weight that is dropped, else 1 / (1 - dropout)."""
    where, H = part.where, p.shape[1]
    queries, sequences = where.q_position[:, rows], where.q_sequence[:, rows] + part.sequence
    keep = dropout.keep_mask(seed, options.dropout, keys.stop, queries, H, sequences)
    # of packed keys, each at its place in its own sequence
    at = where.k_position[:, None, None, keys].expand(p.shape)
    keep = keep.expand(*p.shape[:-1], -1).gather(-1, at)
    return keep.to(p.dtype) * dropout.factor(options.dropout)


def _attention_blocks(terms: AttentionInputs) -> Iterator[tuple[AttentionBlock, Slices]]:
    everything = (slice(None), slice(None), slice(None), slice(None))
    if not by_sequence(terms):
        yield _attention_block(terms, 0), everything
    else:
        for n, where in enumerate(slice_sequences(terms)):
            qb, q_rows, kb, k_rows = where
            own = AttentionInputs(
                terms.q[qb, q_rows],
                terms.k[kb, k_rows],
                terms.v[kb, k_rows],
                None if terms.g is None else terms.g[kb, k_rows],
                terms.sinks,
                terms.slopes
                if terms.slopes is None or terms.slopes.dim() == 1
                else terms.slopes[n : n + 1],
            )
            yield _attention_block(own, n), where


def by_sequence(terms: AttentionInputs) -> bool:
    """Whether sequences differ in length and the host knows the lengths."""
    return terms.q.device.type == "cpu" and not (terms.cu_q is None and terms.lengths is None)


def _attention_block(terms: AttentionInputs, sequence: int) -> AttentionBlock:
    q, k, v, g, sinks, slopes = terms[:6]
    where = positions(terms)
    if terms.cu_q is not None and terms.cu_k is None:
        k, v, g = (None if x is None else x.flatten(0, 1)[None] for x in (k, v, g))
        where = flat_keys(where)
    assert k is not None and v is not None
    if terms.lengths is not None:  # what is not in use may be NaN
        unused = (where.k_sequence < 0)[..., None, None]
        k, v = k.masked_fill(unused, 0), v.masked_fill(unused, 0)
    if k.shape[1] == 0:  # none to look up
        g = None
    q, k, v = (x.to(terms.dtype).transpose(1, 2) for x in (q, k, v))
    return AttentionBlock(
        q.unflatten(1, (k.shape[1], -1)),
        k,
        v,
        None if g is None else g.double().clamp(min=MIN_GATE).cumsum(1).transpose(1, 2),
        None if sinks is None else sinks.to(terms.dtype),
        None if slopes is None else slopes.to(terms.dtype),
        where,
        terms.cu_q is None and terms.lengths is None,
        sequence,
    )


def _hide(part: AttentionBlock, hidden: Tensor) -> AttentionBlock:
    """Without these keys [B, S], which may be NaN."""
    k, v = (x.masked_fill(hidden[:, None, :, None], 0) for x in (part.k, part.v))
    sequence = part.where.k_sequence.masked_fill(hidden, -1)
    return part._replace(k=k, v=v, where=part.where._replace(k_sequence=sequence), bounded=False)


def _blocks(part: AttentionBlock, options: AttentionOptions) -> Iterator[tuple[slice, slice]]:
    """Rows of queries, and the keys that any of them sees."""
    T, S = part.q.shape[3], part.k.shape[2]
    for begin in range(0, T, ROWS):
        end = min(begin + ROWS, T)
        low, high = 0, S
        if part.bounded and options.left >= 0:
            low = min(max(begin + S - T - options.left, 0), S)
        if part.bounded and options.right >= 0:
            high = max(min(end + S - T + options.right, S), low)
        yield slice(begin, end), slice(low, high)


def _scores(
    part: AttentionBlock, rows: slice, keys: slice, options: AttentionOptions
) -> tuple[Tensor, Tensor | None]:
    """x [B, H, rows, keys], -inf where nothing is seen, and the softcap's slope."""
    x = _heads(part.q[..., rows, :].flatten(2, 3) @ part.k[:, :, keys].mT, part)
    x, slope = x * options.scale, None
    if options.softcap:
        t = torch.tanh(x / options.softcap)
        x, slope = options.softcap * t, 1 - t * t
    q_sequence, q_position, q_key, k_sequence, k_position = part.where
    where = Positions(
        q_sequence[:, rows],
        q_position[:, rows],
        q_key[:, rows],
        k_sequence[:, keys],
        k_position[:, keys],
    )
    if part.slopes is not None:
        x = x - sequence_slopes(part.slopes, where) * distance(where)[:, None].abs()
    if part.G is not None:
        between = take(part.G, where.q_key)[..., None] - part.G[:, :, None, keys]
        x = x + between.clamp(max=0.0).to(x.dtype)
    if part.bounded and options.left < 0 and options.right < 0:
        return x, slope
    return x.masked_fill_(~visible(where, options)[:, None], -torch.inf), slope


def _heads(x: Tensor, part: AttentionBlock) -> Tensor:
    """[B, HKV, R * rows, X] -> [B, H, rows, X]"""
    return x.unflatten(2, (part.q.shape[2], -1)).flatten(1, 2)


def _grouped(x: Tensor, part: AttentionBlock) -> Tensor:
    """Its inverse."""
    return x.unflatten(1, part.q.shape[1:3]).flatten(2, 3)


def _finite(lse: Tensor) -> Tensor:
    """0 for -inf: a query that sees nothing has no x above -inf to compare."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
