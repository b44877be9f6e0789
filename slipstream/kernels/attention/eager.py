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
from torch import Tensor
from torch.compiler import is_compiling

from slipstream.common.checks import cast
from slipstream.kernels.attention import dropout, reference
from slipstream.kernels.attention import inputs as arguments
from slipstream.kernels.attention.reference import Positions, distance
from slipstream.runtime.autograd import by_operation, refuse_second, refuse_tangents

# queries at a time: a block of scores has ROWS x S numbers
ROWS = 128


def torch_takes(inputs: arguments.AttentionInputs, options: arguments.AttentionOptions) -> bool:
    """Whether scaled_dot_product_attention does it in linear memory and returns all there is."""
    left, right = options.left, options.right
    q, k, v = inputs[:3]
    if inputs.biased or options.softcap or options.dropout:
        return False
    if q.shape[-1] != v.shape[-1]:
        return False
    if inputs.simple and (left < 0 or left >= k.shape[1] - 1) and k.shape[1] > 0:
        # the only query, standing on the last key, sees all that is left to it
        return right < 0 or (right == 0 and q.shape[1] in (1, k.shape[1]))
    alike = inputs.cu_q is not None and inputs.cu_q is inputs.cu_k and inputs.lengths is None
    return alike and inputs.sequences > 0 and left < 0 and right <= 0 and _readable(q)


def with_torch(inputs: arguments.AttentionInputs, options: arguments.AttentionOptions) -> Tensor:
    """o of a call that torch takes, with torch's gradients."""
    q, k, v = inputs[:3]
    if inputs.cu_q is None:
        causal = options.right == 0 and q.shape[1] > 1
        return _sdpa(q, k, v, options.scale, causal)
    outputs = [
        _sdpa(q[:, a:b], k[:, a:b], v[:, a:b], options.scale, options.right == 0)
        for a, b in pairwise(inputs.cu_q.tolist())
    ]
    return torch.cat(outputs, dim=1)


def _readable(q: Tensor) -> bool:
    return q.is_cpu and not is_compiling()


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    compiling = is_compiling()
    if q.is_cpu and not compiling:
        # torch's product on a CPU reads rows that overlap at other places, and says nothing
        q, k, v = [x.contiguous() if x.stride(1) < x.shape[-1] else x for x in (q, k, v)]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    # branched on, not passed on: under torch.compile torch refuses symbolic comparisons
    chosen: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    chosen |= {"is_causal": True} if causal else {}
    if not compiling:
        refuse_tangents("attention", (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, **chosen)
    if not by_operation() and o.grad_fn is not None and "Flash" in o.grad_fn.name():
        refuse_second(o, "attention")
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
    inputs: arguments.AttentionInputs,
    options: arguments.AttentionOptions,
    hidden: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, DV] in q's dtype and lse [B, H, T], float32 or float64.

    Args:
        hidden: bool [B, S], keys that no query sees, where neither queries nor keys are packed.
    """
    (B, T, H, _), DV = inputs.q.shape, inputs.v.shape[-1]
    o = inputs.q.new_empty(B, T, H, DV)
    lse = inputs.q.new_empty(B, H, T, dtype=inputs.dtype)
    for block, (qb, q_rows, kb, k_rows) in _attention_blocks(inputs):
        if hidden is not None:
            block = _hide(block, hidden[kb, k_rows])
        o_block, lse_block = o[qb, q_rows], lse[qb, :, q_rows]
        for rows, keys in _blocks(block, options):
            x, _ = _scores(block, rows, keys, options)
            if block.sinks is not None:
                x = torch.cat([x, block.sinks[:, None, None].expand(*x.shape[:-1], 1)], -1)
            total = x.logsumexp(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -torch.inf)
            p = (x - _finite(total)[..., None]).exp_()[..., : keys.stop - keys.start]
            if inputs.seed is not None:
                p *= _dropout_factor(p, block, rows, keys, options, inputs.seed)
            y = _grouped(p, block) @ block.v[:, :, keys]
            o_block[:, rows] = _heads(y, block).transpose(1, 2)
            lse_block[:, :, rows] = total
    return o, lse


def backward(
    inputs: arguments.AttentionInputs,
    options: arguments.AttentionOptions,
    o: Tensor,
    lse: Tensor,
    do: Tensor | None,
    dlse: Tensor | None,
) -> dict[str, Tensor]:
    """Gradients by the name of the term, in its shape and dtype."""
    grads = {n: x.new_zeros(x.shape, dtype=inputs.dtype) for n, x in zip("qkv", inputs[:3])}
    if inputs.g is not None:
        grads["g"] = inputs.g.new_zeros(inputs.g.shape, dtype=torch.float64)
    if do is None:
        do = torch.zeros_like(o)
    delta = torch.einsum("bthv,bthv->bht", do.to(inputs.dtype), o.to(inputs.dtype))
    if dlse is not None:
        delta = delta - dlse.to(inputs.dtype)
    for block, slices in _attention_blocks(inputs):
        _block_backward(block, slices, options, lse, delta, do, grads, inputs.seed)
    if inputs.sinks is not None:
        p = (inputs.sinks.to(inputs.dtype)[:, None] - _finite(lse)).exp()
        p = p.masked_fill(lse == -torch.inf, 0.0)
        grads["sinks"] = -(p * delta).sum((0, 2))
    return {name: x.to(getattr(inputs, name).dtype) for name, x in grads.items()}


def _block_backward(
    block: AttentionBlock,
    slices: arguments.Slices,
    options: arguments.AttentionOptions,
    lse: Tensor,
    delta: Tensor,
    do: Tensor,
    grads: dict[str, Tensor],
    seed: Tensor | None,
) -> None:
    """Adds one part's gradients to `grads`."""
    qb, q_rows, kb, k_rows = slices
    HKV, R = block.q.shape[1:3]
    lse, delta = (x[qb, :, q_rows] for x in (lse, delta))
    do = do[qb, q_rows].to(block.q.dtype).transpose(1, 2).unflatten(1, (HKV, R))
    dq = torch.empty_like(block.q)
    dk, dv = torch.zeros_like(block.k), torch.zeros_like(block.v)
    dG = None if block.G is None else torch.zeros_like(block.G)
    for rows, keys in _blocks(block, options):
        x, slope = _scores(block, rows, keys, options)
        p = (x - _finite(lse[..., rows])[..., None]).exp_()
        b_q, b_do = block.q[..., rows, :].flatten(2, 3), do[..., rows, :].flatten(2, 3)
        dp = _heads(b_do @ block.v[:, :, keys].mT, block)
        weights = p
        if seed is not None:
            factor = _dropout_factor(p, block, rows, keys, options, seed)
            weights, dp = p * factor, dp * factor
        dx = p * (dp - delta[..., rows, None])
        dv[:, :, keys] += _grouped(weights, block).mT @ b_do
        if dG is not None:
            dG[..., keys] -= dx.sum(-2)
            at = block.where.q_key[:, None, rows].expand(*dx.shape[:-1])
            dG.scatter_add_(2, at, dx.sum(-1).double())
        if slope is not None:
            dx = dx * slope
        dx = _grouped(dx, block) * options.scale
        dq[..., rows, :] = (dx @ block.k[:, :, keys]).unflatten(2, (R, -1))
        dk[:, :, keys] += dx.mT @ b_q
    grads["q"][qb, q_rows] = dq.flatten(1, 2).transpose(1, 2)
    grads_of_keys = {"k": dk, "v": dv}
    if dG is not None:
        grads_of_keys["g"] = dG.flip(2).cumsum(2).flip(2)
    for name, x in grads_of_keys.items():  # reshaped where all sequences' keys were one
        to = grads[name][kb, k_rows]
        to.copy_(x.transpose(1, 2).reshape(to.shape))


def _dropout_factor(
    p: Tensor,
    block: AttentionBlock,
    rows: slice,
    keys: slice,
    options: arguments.AttentionOptions,
    seed: Tensor,
) -> Tensor:
    """0 for a weight that is dropped, else 1 / (1 - dropout)."""
    where, H = block.where, p.shape[1]
    queries, sequences = where.q_position[:, rows], where.q_sequence[:, rows] + block.sequence
    keep = dropout.keep_mask(seed, options.dropout, keys.stop, queries, H, sequences)
    # of packed keys, each at its place in its own sequence
    at = where.k_position[:, None, None, keys].expand(p.shape)
    keep = keep.expand(*p.shape[:-1], -1).gather(-1, at)
    return keep.to(p.dtype) * dropout.factor(options.dropout)


def _attention_blocks(
    inputs: arguments.AttentionInputs,
) -> Iterator[tuple[AttentionBlock, arguments.Slices]]:
    everything = (slice(None), slice(None), slice(None), slice(None))
    if not by_sequence(inputs):
        yield _attention_block(inputs, 0), everything
    else:
        for n, (sequence, where) in enumerate(arguments.each_sequence(inputs)):
            yield _attention_block(sequence, n), where


def by_sequence(inputs: arguments.AttentionInputs) -> bool:
    """Whether sequences differ in length and the host knows the lengths."""
    return inputs.q.is_cpu and not (inputs.cu_q is None and inputs.lengths is None)


def _attention_block(inputs: arguments.AttentionInputs, sequence: int) -> AttentionBlock:
    q, sinks, slopes = inputs.q, inputs.sinks, inputs.slopes
    k, v, g, where = reference.placed_keys(inputs)
    if inputs.lengths is not None:  # what is not in use may be NaN
        unused = (where.k_sequence < 0)[..., None, None]
        k, v = k.masked_fill(unused, 0), v.masked_fill(unused, 0)
        g = None if g is None else g.masked_fill(unused[..., 0], 0)
    if k.shape[1] == 0:  # none to look up
        g = None
    q, k, v = (cast(x, inputs.dtype).transpose(1, 2) for x in (q, k, v))
    return AttentionBlock(
        q.unflatten(1, (k.shape[1], -1)),
        k,
        v,
        None if g is None else g.double().clamp(min=arguments.MIN_GATE).cumsum(1).transpose(1, 2),
        None if sinks is None else sinks.to(inputs.dtype),
        None if slopes is None else slopes.to(inputs.dtype),
        where,
        inputs.cu_q is None and inputs.lengths is None,
        sequence,
    )


def _hide(block: AttentionBlock, hidden: Tensor) -> AttentionBlock:
    """Without these keys [B, S], which may be NaN."""
    k, v = (x.masked_fill(hidden[:, None, :, None], 0) for x in (block.k, block.v))
    sequence = block.where.k_sequence.masked_fill(hidden, -1)
    return block._replace(k=k, v=v, where=block.where._replace(k_sequence=sequence), bounded=False)


def _blocks(
    block: AttentionBlock, options: arguments.AttentionOptions
) -> Iterator[tuple[slice, slice]]:
    """Rows of queries, and the keys that any of them sees."""
    T, S = block.q.shape[3], block.k.shape[2]
    for begin in range(0, T, ROWS):
        end = min(begin + ROWS, T)
        low, high = 0, S
        if block.bounded and options.left >= 0:
            low = min(max(begin + S - T - options.left, 0), S)
        if block.bounded and options.right >= 0:
            high = max(min(end + S - T + options.right, S), low)
        yield slice(begin, end), slice(low, high)


def _scores(
    block: AttentionBlock, rows: slice, keys: slice, options: arguments.AttentionOptions
) -> tuple[Tensor, Tensor | None]:
    """x [B, H, rows, keys], -inf where nothing is seen, and the softcap's slope."""
    x = _heads(block.q[..., rows, :].flatten(2, 3) @ block.k[:, :, keys].mT, block)
    x, slope = x * options.scale, None
    if options.softcap:
        t = torch.tanh(x / options.softcap)
        x, slope = options.softcap * t, 1 - t * t
    q_sequence, q_position, q_key, k_sequence, k_position = block.where
    where = Positions(
        q_sequence[:, rows],
        q_position[:, rows],
        q_key[:, rows],
        k_sequence[:, keys],
        k_position[:, keys],
    )
    if block.slopes is not None:
        x = x - reference.sequence_slopes(block.slopes, where) * distance(where)[:, None].abs()
    if block.G is not None:
        between = reference.take(block.G, where.q_key)[..., None] - block.G[:, :, None, keys]
        x = x + between.to(x.dtype)
    if block.bounded and options.left < 0 and options.right < 0:
        return x, slope
    return x.masked_fill_(~reference.visible(where, options)[:, None], -torch.inf), slope


def _heads(x: Tensor, block: AttentionBlock) -> Tensor:
    """[B, HKV, R * rows, X] -> [B, H, rows, X]"""
    return x.unflatten(2, (block.q.shape[2], -1)).flatten(1, 2)


def _grouped(x: Tensor, block: AttentionBlock) -> Tensor:
    """Its inverse."""
    return x.unflatten(1, block.q.shape[1:3]).flatten(2, 3)


def _finite(lse: Tensor) -> Tensor:
    """0 for -inf: a query that sees nothing has no x above -inf to compare."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
