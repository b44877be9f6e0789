"""Torch's BlockMask as lists of blocks of keys, which attention takes as `selected`.

The mask is made from its function a row of its blocks at a time, and read twice: once for the
largest blocks of keys that each query sees as a whole or not at all, once for the lists. What comes
of it is remembered at the mask itself.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.common import key_blocks


class Lists(NamedTuple):
    """Arguments of attention of these names."""

    selected: Tensor  # int32 [B, T, 1 or H, N]
    block: int
    causal: bool


def lists_of(mask: Any, q: Tensor, k: Tensor, beside: dict[str, Any]) -> Lists:
    """
    Raises:
        TypeError: no BlockMask. ValueError: it is of other sizes, or on another device.
        NotImplementedError: beside another argument; while exporting, for what is asked of the mask
            waits for the device.
    """
    absent = {"block": 1, "tail": False}
    for name, x in beside.items():
        if x != absent[name] if name in absent else x is not None:
            raise NotImplementedError(f"{name}: is not implemented with block_mask")
    if type(mask).__name__ != "BlockMask":  # torch makes its module when it is first asked for
        raise TypeError(f"block_mask: want torch's BlockMask, got {type(mask).__name__}")
    if torch.compiler.is_compiling():
        raise NotImplementedError("block_mask: want a call that is not exported")
    (B, T, H), S, (rows, heads) = q.shape[:3], k.shape[1], mask.kv_num_blocks.shape[:2]
    if mask.kv_num_blocks.device != q.device:
        text = f"block_mask: want a mask on {q.device}, got {mask.kv_num_blocks.device}"
        raise ValueError(text)
    known = mask.kv_num_blocks.shape[2] * mask.BLOCK_SIZE[0]
    got = rows, heads, min(known, mask.seq_lengths[0]), mask.seq_lengths[1]
    if rows not in (1, B) or heads not in (1, H) or got[2:] != (T, S):
        text = f"block_mask: want sizes (1 or {B}, 1 or {H}, {T}, {S}), got {got}"
        raise ValueError(text)
    parts = "mask_mod", "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
    made_of, found = [getattr(mask, x) for x in parts], getattr(mask, "_slipstream_lists", None)
    if found is None or any(x is not y for x, y in zip(made_of, mask._slipstream_made_of)):
        found = mask._slipstream_lists = _lowered(mask)  # pyright: ignore
        mask._slipstream_made_of = made_of
    return found._replace(selected=found.selected.expand(B, -1, -1, -1))


@torch.inference_mode(False)  # for calls with gradients too
def _lowered(mask: Any) -> Lists:
    (T, S), device = mask.seq_lengths, mask.kv_num_blocks.device
    none = torch.ones((), dtype=torch.bool, device=device)
    # of no later keys, and of each size of blocks without and with the bound of causal attention
    holds = [none] * (1 + 2 * len(key_blocks.SIZES))
    counts = [none.int() * 0] * len(key_blocks.SIZES)
    keys = torch.arange(S, device=device)
    for at, seen in _rows(mask):
        later = keys > at[:, None]
        holds[0] = holds[0] & ~(seen & later).any()
        for i, size in enumerate(key_blocks.SIZES):
            some = _by_block(seen, size, False).any(-1)
            counts[i] = counts[i].maximum(some.sum(-1, dtype=torch.int32).max())
            for j, free in enumerate((torch.zeros_like(later), later)):
                whole = _by_block(seen | free, size, True).all(-1)
                n = 1 + 2 * i + j
                holds[n] = holds[n] & (whole | ~some).all()
    answers = [bool(x) for x in torch.stack(holds).tolist()]
    causal = T == S and answers[0]
    i = max(i for i in range(len(key_blocks.SIZES)) if answers[1 + 2 * i + causal])
    size, most = key_blocks.SIZES[i], int(counts[i])
    found = [mask.kv_num_blocks.new_empty(*mask.kv_num_blocks.shape[:2], 0, most).int()]
    for _, seen in _rows(mask):
        some = _by_block(seen, size, False).any(-1)
        block = torch.arange(some.shape[-1], dtype=torch.int32, device=device)
        listed = torch.where(some, block, len(block)).sort(-1)[0][..., :most]
        found.append(torch.where(listed < len(block), listed, -1).int())
    return Lists(torch.cat(found, 2).transpose(1, 2).contiguous(), size, causal)


def _rows(mask: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Positions of a row of blocks' queries [R], and which keys they see [B, H, R, S]."""
    from torch.nn.attention.flex_attention import create_mask

    (T, S), (R, C) = mask.seq_lengths, mask.BLOCK_SIZE
    device, sizes = mask.kv_num_blocks.device, mask.kv_num_blocks.shape[:2]
    of_key = torch.arange(S, device=device) // C
    partial = _dense(mask.kv_num_blocks, mask.kv_indices, -(-S // C))
    full = torch.zeros_like(partial)
    if mask.full_kv_num_blocks is not None:
        full = _dense(mask.full_kv_num_blocks, mask.full_kv_indices, -(-S // C))
    for i, begin in enumerate(range(0, T, R)):

        def shifted(b: Tensor, h: Tensor, t: Tensor, s: Tensor, begin: int = begin) -> Tensor:
            return mask.mask_mod(b, h, t + begin, s)

        at = torch.arange(begin, min(begin + R, T), device=device)
        made = create_mask(shifted, sizes[0], sizes[1], len(at), S, device=device)
        whole, part = (x[:, :, i, None, of_key] for x in (full, partial))
        yield at, whole | (part & made)


def _dense(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """[B, H, rows, columns]: which blocks are among the first `counts` of `indices`."""
    place = torch.arange(indices.shape[-1], device=counts.device)
    listed = (place < counts[..., None]) & (indices >= 0) & (indices < columns)
    at = torch.where(listed, indices, columns).long()
    return counts.new_zeros(*counts.shape, columns + 1).scatter_(-1, at, 1)[..., :columns].bool()


def _by_block(seen: Tensor, size: int, rest: bool) -> Tensor:
    """[..., blocks, size], with `rest` behind the last key."""
    short = -seen.shape[-1] % size
    return torch.nn.functional.pad(seen, (0, short), value=rest).unflatten(-1, (-1, size))
