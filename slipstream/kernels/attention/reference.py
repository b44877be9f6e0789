"""Softmax attention as a formula, dense, in any dtype: the oracle of the tests.

    x_ts = f(scale q_t . k_s) - slope |p_t - p_s| + g_{s+1} + ... + g_t     f(x) = c tanh(x / c)
    lse_t = log(exp(sink) + sum over visible s of exp(x_ts))
    o_t = sum over visible s of exp(x_ts - lse_t) v_s

Each part only if asked for: without softcap c, f(x) = x; without a sink its exponential is 0.

Symbols: B batch, T queries, S keys, H heads of q, HKV of k and v, D and DV widths, N sequences.
What a query sees: keys of its own sequence, at most `left` before it and `right` after it, where
positions p count from the sequence's start and the last query stands on the last key (-1 is no
bound). A query that sees nothing has o = 0, and without a sink lse = -inf.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention.inputs import MIN_GATE, AttentionInputs, AttentionOptions


class Positions(NamedTuple):
    """Sequence and position of each query [B or 1, T] and key [N or 1, S]; key: the row of k that
    a query stands on. Keys that no sequence uses are of sequence -1.
    """

    q_sequence: Tensor
    q_position: Tensor
    q_key: Tensor
    k_sequence: Tensor
    k_position: Tensor


def softmax_reference(
    inputs: AttentionInputs, options: AttentionOptions, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, DV] and lse [B, H, T]. seen: [B, G, T, S], what each of G groups of heads sees,
    whatever the window; None: what the window lets it see."""
    q, sinks, slopes = inputs.q, inputs.sinks, inputs.slopes
    k, v, g, where = placed_keys(inputs)
    seen = visible(where, options)[:, None] if seen is None else seen
    if k.shape[1] == 0:
        k, v = (torch.cat([x, x.new_zeros(x.shape[0], 1, *x.shape[2:])], 1) for x in (k, v))
        seen = seen.new_zeros(*seen.shape[:-1], 1)
        g = slopes = None
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    x = torch.einsum("bthd,bshd->bhts", q, k) * options.scale
    if options.softcap:
        x = options.softcap * torch.tanh(x / options.softcap)
    if slopes is not None:
        x = x - sequence_slopes(slopes, where) * distance(where)[:, None].abs()
    if g is not None:
        G = g.clamp(min=MIN_GATE).cumsum(1).transpose(1, 2)  # [., H, S]
        x = x + take(G, where.q_key)[..., None] - G[:, :, None]
    seen = seen.repeat_interleave(q.shape[2] // seen.shape[1], 1)
    x = x.masked_fill(~seen, float("-inf"))
    if sinks is None:
        extra = torch.full_like(x[..., :1], float("-inf"))
    else:
        extra = sinks.to(x.dtype)[:, None, None].expand_as(x[..., :1])
    both = torch.cat([x, extra], -1)
    has_no_key = both.detach().amax(-1) == float("-inf")  # sees nothing at all
    lse = both.masked_fill(has_no_key[..., None], 0.0).logsumexp(-1)
    p = (x - lse[..., None]).exp()
    o = torch.einsum("bhts,bshd->bthd", p, v)
    return o, lse.masked_fill(has_no_key, float("-inf"))


def positions(inputs: AttentionInputs) -> Positions:
    """Without reading a device's offsets."""
    device, (B, T), (KB, S) = inputs.q.device, inputs.q.shape[:2], inputs.k.shape[:2]
    N = inputs.sequences
    q_sequence, q_begin, queries = _rows(inputs.cu_q, B, T, N, device)
    k_sequence, k_begin, keys = _rows(inputs.cu_k, KB, S, N, device)
    if inputs.lengths is not None:
        keys = torch.minimum(inputs.lengths.long().clamp(min=0), keys)
    if N == 0:
        none = torch.zeros(1, T, dtype=torch.long, device=device)
        return Positions(none, none, none, none.new_full((1, S), -1), none.new_zeros(1, S))
    q_row = torch.arange(T, device=device) - q_begin[q_sequence]
    k_row = torch.arange(S, device=device) - k_begin[k_sequence]
    q_position = q_row + (keys - queries)[q_sequence]
    used = k_row < keys[k_sequence]
    q_key = (q_position + k_begin[q_sequence]).clamp(0, max(S - 1, 0))
    return Positions(q_sequence, q_position, q_key, torch.where(used, k_sequence, -1), k_row)


def _rows(
    cu: Tensor | None, B: int, rows: int, N: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The sequence of each row [B or 1, rows]; each sequence's first row and number of rows [N]."""
    if cu is None:
        batch = torch.arange(B, device=device)
        return batch[:, None].expand(B, rows), torch.zeros_like(batch), torch.full_like(batch, rows)
    begin = cu.long()
    token = torch.arange(rows, device=device)
    sequence = torch.searchsorted(begin[1:], token, right=True).clamp(max=max(N - 1, 0))
    return sequence[None], begin[:-1], begin.diff()


def placed_keys(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor | None, Positions]:
    """k, v, g and the positions; keys [N, S] of packed queries as [1, N * S]."""
    k, v, g, where = inputs.k, inputs.v, inputs.g, positions(inputs)
    if inputs.cu_q is None or inputs.cu_k is not None:
        return k, v, g, where
    where = where._replace(
        q_key=where.q_key + where.q_sequence * k.shape[1],
        k_sequence=where.k_sequence.flatten()[None],
        k_position=where.k_position.flatten()[None],
    )
    g = None if g is None else g.flatten(0, 1)[None]
    return k.flatten(0, 1)[None], v.flatten(0, 1)[None], g, where


def visible(where: Positions, options: AttentionOptions) -> Tensor:
    """[B or 1, T, S]"""
    same = where.q_sequence[:, :, None] == where.k_sequence[:, None]
    window = (options.left, options.right)
    age = distance(where)
    if window[0] >= 0:
        same = same & (age <= window[0])
    if window[1] >= 0:
        same = same & (age >= -window[1])
    return same


def distance(where: Positions) -> Tensor:
    return where.q_position[:, :, None] - where.k_position[:, None]


def sequence_slopes(slopes: Tensor, where: Positions) -> Tensor:
    """[H] or [N, H] -> [B or 1, H, T or 1, 1]"""
    if slopes.dim() == 1:
        return slopes[None, :, None, None]
    if slopes.shape[0] == 0:  # no sequence, and no query that has one
        return slopes.new_zeros(1, slopes.shape[1], 1, 1)
    return slopes[where.q_sequence].transpose(1, 2)[..., None]


def take(G: Tensor, q_key: Tensor) -> Tensor:
    """G [B, H, S] at the keys [B, T] that queries stand on -> [B, H, T]"""
    return G.gather(2, q_key[:, None].expand(G.shape[0], G.shape[1], -1))
