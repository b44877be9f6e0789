"""attn_implementation="slipstream": softmax attention of any transformers model by ops.attention.

Importing this registers two functions. transformers calls the first once a forward pass, to make
what it calls a mask, and the second in every layer, which gets that mask. Ours is never dense where
the keys that a query sees are consecutive; it is an int32 tensor of four dimensions, for that is
what every model passes on untouched, and its shape says what it holds:

    None            every key is real, and the last query stands on the last one
    [B, 1, 1, 1]    how many of a row's keys are in use: a static cache
    [B, 1, 1, 2]    the first key in use and the one past the last: padding
    [1, 1, N+1, 1]  offsets of N sequences, if the B rows are laid one behind the other: packed

Windows, softcap and sinks come to the second function from the layer. What is none of these, such
as a mask of the user's own, goes through plain torch with a dense mask.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from slipstream.ops.attention import attention
from slipstream.ops.flash_attn import flash_attn_with_kvcache

NAME = "slipstream"
# more queries than this are no decoding step: the kernel for that reads the keys for all at once
MOST_DECODED = 16
# transformers' functions of (batch, head, query, key) and how they are put together: those that let
# a query see consecutive keys and that the second function knows of, and those that cut a row up
_CONSECUTIVE = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
)
_CUTS = ("packed_sequence_mask_function", "chunked_overlay")
_WRAPPERS = ("and_masks", "remap_positions_for_packed_sequence")

logger = logging.getLogger(__name__)


def slipstream_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """What a layer has to know about who sees whom, as this file's head says.

    Args:
        q_length, kv_length: T queries and S keys, with key 0 at token kv_offset and query 0 at
            q_offset; on a device if the cache is static.
        mask_function: (batch, head, query, key) -> whether it is seen, padding apart.
        attention_mask: bool [B, tokens], False where there is padding.
        allow_is_causal_skip, allow_is_bidirectional_skip: False if the caller wants to look into
            the mask.
    """
    names = {""} if use_vmap else _names(mask_function)
    known = names <= {*_CONSECUTIVE, *_CUTS}
    cuts = known and not names.isdisjoint(_CUTS)
    square = q_length == kv_length and isinstance(q_offset, int) and q_offset == kv_offset
    mask = None
    if attention_mask is not None:
        mask = attention_mask[:, kv_offset : kv_offset + kv_length]
    if cuts and square and (mask is None or _all(mask)):
        return _offsets(mask_function, batch_size, q_length, device)
    causal = "causal_mask_function" in names
    may_skip = allow_is_causal_skip if causal else allow_is_bidirectional_skip
    if known and not cuts and (may_skip or q_length == 1):
        stand = q_offset + q_length - kv_offset
        used = _in_use(batch_size, stand, kv_length, mask, square, causal, device)
        if used is not _IRREGULAR:
            return used  # pyright: ignore[reportReturnType]
    if not torch.compiler.is_compiling():
        _say_dense()
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,  # pyright: ignore[reportArgumentType]
        kv_offset,
        mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        device=device,
    )


_IRREGULAR = object()


def _in_use(
    batch: int,
    stand: int | Tensor,
    keys: int,
    mask: Tensor | None,
    square: bool,
    causal: bool,
    device: torch.device | str,
) -> Tensor | object | None:
    """The keys in use, of which the last query stands on number stand - 1, or on padding behind
    the last; None if it is all of them, _IRREGULAR if they are not consecutive."""
    exact = isinstance(stand, int)
    if mask is None:
        return None if exact and stand == keys else _counts(stand, batch, device)
    if not (square or causal):
        return None if exact and stand == keys and _all(mask) else _IRREGULAR
    begin = mask.int().argmax(1)
    if square:
        end = mask.shape[1] - mask.flip(1).int().argmax(1)
        real = mask.sum(1)
    else:
        end = begin * 0 + stand
        # what the mask is too short for counts as padding
        real = (mask & (torch.arange(mask.shape[1], device=mask.device) < end[:, None])).sum(1)
    if not torch.compiler.is_compiling():
        whole = (begin == 0) & (real == end)
        if exact and stand == keys:
            whole &= end == keys
        regular, whole = torch.stack([(real == end - begin).all(), whole.all()]).tolist()
        # a row that is all padding is nobody's
        if not regular and not bool(((real == end - begin) | (real == 0)).all()):
            return _IRREGULAR
        if whole:
            return None if exact and stand == keys else _counts(stand, batch, device)
    return torch.stack([begin, end], 1).int()[:, None, None, :]


def _counts(stand: int | Tensor, batch: int, device: torch.device | str) -> Tensor:
    counts = torch.as_tensor(stand, dtype=torch.int32, device=device)
    return counts.expand(batch).clone()[:, None, None, None]


def _offsets(
    mask_function: Callable, batch: int, tokens: int, device: torch.device | str
) -> Tensor | None:
    """Where sequences begin: at tokens that do not see the one before them."""
    row = torch.arange(batch, device=device)[:, None]
    token = torch.arange(1, tokens, device=device)[None]
    begins = ~mask_function(row, row * 0, token, token - 1).expand(batch, tokens - 1)
    begins = torch.cat([begins.new_ones(batch, 1), begins], 1).flatten()
    end = batch * tokens
    if torch.compiler.is_compiling():  # as many as there can be, empty ones at the end
        place = torch.arange(end, device=device)
        found = torch.where(begins, place, end).sort().values
    else:
        found = begins.nonzero()[:, 0]
        if found.shape[0] == batch:
            return None
    offsets = torch.cat([found, found.new_full((1,), end)])
    return offsets.int()[None, None, :, None]


def slipstream_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer: query [B, H, T, D], key [B, HKV, S, D], value [B, HKV, S, DV] -> [B, T, H, DV].

    Raises:
        NotImplementedError: dropout, a bias by position, or a cache of pages.
    """
    _refuse(dropout, kwargs)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # norms in float32 leave q and k wider than v
    query, key = query.to(value.dtype), key.to(value.dtype)
    options: dict[str, Any] = {"softcap": softcap, "sinks": s_aux}
    if attention_mask is not None and attention_mask.dtype != torch.int32:
        return _dense(query, key, value, attention_mask, scaling, **options), None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if sliding_window is None:
        window = (-1, -1)
    else:  # of that many keys, its own included; without causal on either side
        window = (sliding_window - 1, 0) if is_causal else (sliding_window, sliding_window)
    options |= {"scale": scaling, "causal": is_causal, "window_size": window}
    offsets = kwargs.get("cu_seq_lens_q")
    if offsets is None and attention_mask is not None and attention_mask.shape[-2] > 1:
        offsets = attention_mask.flatten()
    if offsets is not None:
        o = _packed(q, k, v, offsets, kwargs.get("cu_seq_lens_k"), options)
    elif attention_mask is None:
        o = _plain(q, k, v, None, None, options)
    else:
        used = attention_mask[:, 0, 0].expand(q.shape[0], -1).unbind(1)
        begin, end = used if len(used) == 2 else (None, used[0])
        o = _plain(q, k, v, begin, end, options)
    return o, None


def _refuse(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise NotImplementedError(f"dropout: want 0, got {dropout}; set attention_dropout to 0")
    for name in ("position_bias", "cache"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{name}: not taken; use another attn_implementation")


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begin: Tensor | None,
    end: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """[B, T, H, D] and keys [begin, end) of [B, S, HKV, ...]."""
    grads = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    T, S = q.shape[1], k.shape[1]
    few = T <= MOST_DECODED and T < S and not grads
    if few and (begin is not None or q.is_cuda):
        renamed = {("softmax_scale" if x == "scale" else x): y for x, y in options.items()}
        renamed["softcap"] = options["softcap"] or 0.0
        o = flash_attn_with_kvcache(q, k, v, cache_seqlens=end, cache_leftpad=begin, **renamed)
        assert isinstance(o, Tensor)
        return o
    if begin is None:
        return attention(q, k, v, key_lengths=end, **options)
    assert end is not None
    return _padded(q, k, v, begin, end, options)


def _padded(
    q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor, options: dict[str, Any]
) -> Tensor:
    """Rows one behind the other; each is three sequences: padding, what is real, what is left."""
    (B, T), S = q.shape[:2], k.shape[1]
    row = torch.arange(B, device=q.device, dtype=torch.int32)
    if T == S:
        cu_q = cu_k = _bounds(row, begin, end, S)
    else:
        before = (begin - (end - T)).clamp(0, T)  # queries that stand on padding
        cu_q = _bounds(row, before, before * 0 + T, T)
        cu_k = _bounds(row, begin, end, S)
    return _packed(q, k, v, cu_q, cu_k, options)


def _bounds(row: Tensor, begin: Tensor, end: Tensor, length: int) -> Tensor:
    cuts = torch.stack([begin, end, begin * 0 + length], 1).int() + row[:, None] * length
    return torch.cat([cuts.new_zeros(1), cuts.flatten()])


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    B, T = q.shape[:2]
    q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
    if cu_k is cu_q or cu_k is None:
        o = attention(q, k, v, cu_seqlens=cu_q, **options)
    else:
        o = attention(q, k, v, cu_seqlens=cu_q, cu_seqlens_k=cu_k, **options)
    return o.unflatten(1, (B, T))[0]


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Plain torch, [B, H, T, D] -> [B, T, H, DV]; mask bool, or added to the scores."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    x = (q @ k.mT).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        x = softcap * (x / softcap).tanh()
    mask = mask[..., : k.shape[2]]
    if mask.dtype == torch.bool:
        # finite, so that a query that sees nothing has no NaN
        x = x.masked_fill(~mask, torch.finfo(x.dtype).min)
    else:
        x = x + mask
    if sinks is not None:
        beside = sinks.to(x.dtype)[:, None, None].expand(*x.shape[:-1], 1)
        x = torch.cat([x, beside], -1)
    p = x.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return (p @ v).transpose(1, 2).contiguous()


def _names(function: Callable) -> set[str]:
    """Of the functions that a mask function is made of; of one that is not transformers', ""."""
    if function is causal_mask_function:  # torch.compile knows its name only by this
        return {"causal_mask_function"}
    if getattr(function, "__module__", "") != sdpa_mask.__module__:
        return {""}
    name = function.__qualname__.split(".")[0]
    if name not in _WRAPPERS:
        return {name}
    if torch.compiler.is_compiling():
        # torch.compile does not look inside; what cuts a row up is found by asking about each token
        return {_CUTS[0]} if name == "and_masks" else {""}
    parts: list[Callable] = []
    for cell in function.__closure__ or ():
        x = cell.cell_contents
        parts += [y for y in (x if isinstance(x, tuple | list) else (x,)) if callable(y)]
    return set().union(*(_names(x) for x in parts if not isinstance(x, Tensor)))


def _all(mask: Tensor) -> bool:
    """Whether no key is padding; not known while torch.compile traces."""
    return not torch.compiler.is_compiling() and bool(mask.all())


@cache
def _say_dense() -> None:
    logger.warning("slipstream: a mask that is not causal, windowed, padded or packed is dense")


AttentionInterface.register(NAME, slipstream_attention)
AttentionMaskInterface.register(NAME, slipstream_mask)
