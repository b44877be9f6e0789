"""Attention to what an indexer selects, of transformers' Qwen4-Exp (QSA), MiniMax-M3 (MSA), and
DeepSeek V3.2 and GLM (DSA), on ops.index and ops.attention: no mask of all keys, no loop over
queries.

patch() puts the functions of FORWARDS in the place of forward of the classes of these names. Keys
and the indexer's keys are in transformers' own cache. What is packed, and what is padding, they
learn as class_mixers.py says; a cache whose rows have padding is transformers' own business. Of
equal scores the earlier block is selected, where transformers takes any.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import StaticLayer

from slipstream.common import checks, key_blocks
from slipstream.integrations import masks
from slipstream.integrations.hyper_connections import code_of
from slipstream.integrations.rows import Rows, rows_of
from slipstream.layers.base import RECURRENT_UP_TO
from slipstream.layers.mla import absorbed
from slipstream.nn.linear import plain_linear
from slipstream.ops._fp32 import widen
from slipstream.ops.attention import attention, latent_attention
from slipstream.ops.indexer import index, index_loss
from slipstream.runtime.autograd import with_loss


def qwen4_exp(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Any = None,
    cache: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """QSA: a query sees the best blocks of keys, by their mean, and its own until complete."""
    cache, rows = _begin(self, hidden_states, attention_mask, cache or past_key_values, kwargs)
    own, T = self.indexer, hidden_states.shape[1]
    block, x = own.compress_ratio, rows.pack(hidden_states)
    full = [_of_rows(y, hidden_states) for y in position_embeddings]
    now = [rows.pack(y[:, -T:]) for y in full]
    rotate = _rotary(self)
    q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
    k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.k_proj, self.v_proj))
    q, k = rotate(self.q_norm(q), self.k_norm(k), *now, unsqueeze_dim=2)
    weight = _weight(self, cache)
    with torch.set_grad_enabled(weight > 0):  # lists have no gradient
        heads = own.index_qk_proj(x.detach()).unflatten(-1, (-1, own.index_head_dim))
        raw = heads[:, :, -1]
        if cache is not None:
            raw = _all_keys(cache.update_indexer(rows.unpack(raw), self.layer_idx), raw, T)
        first, _ = key_blocks.blocks_of(raw.shape[1], block, rows.cuts, raw.device)
        at = [y[:, first] for y in (full if rows.cuts is None else now)]
        blocks = own.k_layernorm(key_blocks.pooled_keys(raw, block, rows.cuts))
        blocks = rotate(blocks[:, None], cos=at[0], sin=at[1])[:, 0]
        asked = rotate(own.q_layernorm(heads[:, :, :-1]), cos=now[0], sin=now[1], unsqueeze_dim=2)
        of: dict[str, Any] = {"block": block, "pool": "none", "cu_seqlens": rows.cuts}
        lengths = _lengths(raw, rows, T)
        selected = index(asked, blocks, topk=own.block_topk, key_lengths=lengths, **of)
    if weight > 0:
        of |= {"selected": selected, "attention_scale": self.scaling}
        loss = index_loss(asked, blocks, q.detach(), k.detach(), **of)
        q = _with_loss(own, q, loss, weight)
    options = {"selected": selected, "block": block, "tail": True}
    o = _attend(self, rows, cache, (q, k, v), options)
    o = o * torch.sigmoid(gate.reshape(o.shape))
    return rows.unpack(self.o_proj(o)), None


def minimax_m3(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Any = None,
    cache: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """MSA: the heads of a key head see the blocks with the best keys, the last ones always; a layer
    without an indexer sees all keys. Blocks begin with a sequence, not with its padding."""
    cache, rows = _begin(self, hidden_states, attention_mask, cache or past_key_values, kwargs)
    own, T, x = self.indexer, hidden_states.shape[1], rows.pack(hidden_states)
    tables = [rows.pack(_of_rows(y, hidden_states)) for y in position_embeddings]
    rotate = _rotary(self)
    projections = self.q_proj, self.k_proj, self.v_proj
    q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in projections)
    q, k = rotate(self.q_norm(q), self.k_norm(k), *tables, unsqueeze_dim=2)
    options: dict[str, Any] = {}
    if own is not None:
        weight = _weight(self, cache)
        with torch.set_grad_enabled(weight > 0):
            read = x.detach()
            asked = own.q_norm(own.q_proj(read).unflatten(-1, (-1, own.head_dim)))
            key = own.k_norm(own.k_proj(read).unflatten(-1, (-1, own.head_dim)))
            narrow = [y[..., : own.head_dim] for y in tables]
            asked, key = rotate(asked, key, *narrow, unsqueeze_dim=2)
            key = key[:, :, 0]
            if cache is not None:
                every = cache.layers[self.layer_idx].update_index(rows.unpack(key)[:, None])
                key = _all_keys(every[:, 0], key, T)
            of: dict[str, Any] = {"block": own.block_size, "groups": own.num_heads}
            of |= {"activation": "identity", "cu_seqlens": rows.cuts}
            selected = index(asked, key, topk=own.topk_blocks, local=own.local_blocks, **of)
        if weight > 0:
            of |= {"selected": selected, "attention_scale": self.scaling}
            loss = index_loss(asked, key, q.detach(), k.detach(), **of)
            q = _with_loss(own, q, loss, weight)
        options = {"selected": selected, "block": own.block_size}
    o = _attend(self, rows, cache, (q, k, v), options)
    return rows.unpack(self.o_proj(o)), None


def glm_moe_dsa(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Any = None,
    cache: Any = None,
    past_key_values: Any = None,
    position_ids: Any = None,
    prev_topk_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None, Tensor | None]:
    """DSA; a layer without an indexer sees what the one before selected."""
    cache, rows = _begin(self, hidden_states, attention_mask, cache or past_key_values, kwargs)
    own, T, x = self.indexer, hidden_states.shape[1], rows.pack(hidden_states)
    tables = [rows.pack(_of_rows(y, hidden_states)) for y in position_embeddings]
    module = sys.modules[type(self).__module__]
    narrow, q, c, r = _projected(self, x)
    q_nope, q_rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
    q_rope, r = module.apply_rotary_pos_emb_interleave(q_rope, r, *tables, unsqueeze_dim=2)
    heads = torch.cat([q_nope, q_rope], -1), c, r
    if own is None:
        selected = _listed(prev_topk_indices, rows)
        return _attend_latents(self, rows, cache, heads, selected), None, prev_topk_indices
    weight = _weight(self, cache)
    with torch.set_grad_enabled(weight > 0):
        asked, key, weights = _asked(own, x, narrow)
        halves = "apply_rotary_pos_emb" in code_of(type(own).forward).co_names
        rotate = module.apply_rotary_pos_emb if halves else module.apply_rotary_pos_emb_interleave
        turned = self.qk_rope_head_dim
        parts = rotate(asked[..., :turned], key[..., :turned], *tables, unsqueeze_dim=2)
        asked, key = (torch.cat([y, z[..., turned:]], -1) for y, z in zip(parts, (asked, key)))
        key = key[:, :, 0]
        if cache is not None:
            key = _all_keys(cache.update_indexer(rows.unpack(key), self.layer_idx), key, T)
        of: dict[str, Any] = {"topk": own.index_topk, "key_lengths": _lengths(key, rows, T)}
        selected = index(asked, key, weights, cu_seqlens=rows.cuts, **of)
    if weight > 0:
        heads = _with_latent_loss(self, heads, (asked, key, weights), weight, rows, selected)
    o = _attend_latents(self, rows, cache, heads, selected)
    # transformers' own have no entry that is none: the first one again, which counts once
    tokens = _tokens(selected[:, :, 0], rows)
    return o, None, torch.where(tokens < 0, tokens[..., :1].clamp(min=0), tokens)


def glm5_next(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    cache: Any = None,
    past_key_values: Any = None,
    prev_topk_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None, Tensor | None]:
    """DSA without rotations, by blocks of keys that a learned mean stands for, and the open one."""
    cache, rows = _begin(self, hidden_states, attention_mask, cache or past_key_values, kwargs)
    own, x = self.indexer, rows.pack(hidden_states)
    narrow, *heads = _projected(self, x)
    if own is None:
        selected = _listed(prev_topk_indices, rows)
        return _attend_latents(self, rows, cache, (*heads,), selected), None, None
    weight, block = _weight(self, cache), own.index_kpool
    with torch.set_grad_enabled(weight > 0):
        asked, key, weights = _asked(own, x, narrow)
        gate = F.linear(x.detach(), own.index_kpool_compress_gate)
        packed = torch.cat([key[:, :, 0], gate, torch.ones_like(gate[..., :1])], -1)
        if cache is not None:
            new = rows.unpack(packed)
            if isinstance(attention_mask, Tensor) and attention_mask.shape == new.shape[:2]:
                new = torch.cat([new[..., :-1], attention_mask[..., None].to(new.dtype)], -1)
            every = cache.update_indexer(new, self.layer_idx)
            packed = _all_keys(every, packed, rows.size[1])
        first, _ = key_blocks.blocks_of(packed.shape[1], block, rows.cuts, x.device)
        keys, gates, _ = packed[:, first[:, None] + torch.arange(block, device=x.device)].split(
            [own.head_dim, own.head_dim, 1], -1
        )
        share = (widen(gates) + widen(own.index_kpool_compress_ape)).softmax(2)
        pooled = (share.to(keys.dtype) * keys).sum(2)
        of: dict[str, Any] = {"block": block, "pool": "none"}
        lengths = _lengths(packed, rows, rows.size[1])
        more = {"cu_seqlens": rows.cuts, "key_lengths": lengths, "topk": own.index_topk // block}
        selected = index(asked, pooled, weights, **more, **of)
    heads = (*heads,)
    if weight > 0:
        heads = _with_latent_loss(
            self, heads, (asked, pooled, weights), weight, rows, selected, **of
        )
    tail = bool(own.index_kpool_always_select_tail)
    at = torch.arange(x.shape[1], device=x.device) + packed.shape[1] - x.shape[1]
    if rows.cuts is not None:
        at = at - _places(rows)[0]
    single = key_blocks.keys_of_blocks(selected[:, :, 0], block, at if tail else None)
    o = _attend_latents(self, rows, cache, heads, selected, single, block=block, tail=tail)
    return o, None, _tokens(single, rows) if self.next_skip_topk else None


@wraps(glm_moe_dsa)
def deepseek_v32(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """DSA, whose layers all have indexers."""
    return glm_moe_dsa(*args, **kwargs)[:2]


def _projected(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries' latent, q [B, T, H, nope + P], the keys' latent c [B, T, R] and r [B, T, 1, P]."""
    narrow = self.q_a_layernorm(self.q_a_proj(x))
    q = self.q_b_proj(narrow).unflatten(-1, (-1, self.qk_head_dim))
    c, r = self.kv_a_proj_with_mqa(x).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
    return narrow, q, self.kv_a_layernorm(c), r[:, :, None]


def _asked(own: Any, x: Tensor, narrow: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An indexer's queries [B, T, HI, D], key [B, T, 1, D] and weights [B, T, HI]."""
    q = own.wq_b(narrow.detach()).unflatten(-1, (-1, own.head_dim))
    x = x.detach()
    weights = own.weights_proj(x.to(own.weights_proj.weight.dtype)) * own.n_heads**-0.5
    return q, own.k_norm(own.wk(x))[:, :, None], weights


def _with_latent_loss(
    self: Any,
    heads: tuple[Any, ...],
    asked: tuple[Tensor, Tensor, Tensor],
    weight: float,
    rows: Rows,
    selected: Tensor,
    **of: Any,
) -> tuple[Any, ...]:
    """heads, with the indexer's loss along. One key of all heads is less to gather."""
    q, (c, r), projection = heads[0], (y.detach() for y in heads[1:]), self.kv_b_proj
    if plain_linear(projection):
        near, _ = absorbed(q.detach(), projection.weight.detach(), *_widths(self))
        keys = torch.cat([c[:, :, None], r], -1)
    else:
        with torch.no_grad():
            near, (keys, _) = q, _written_out(self, c, r)
    of |= {"selected": selected, "attention_scale": self.scaling, "cu_seqlens": rows.cuts}
    loss = index_loss(*asked[:2], near.detach(), keys, asked[2], **of)
    return _with_loss(self.indexer, q, loss, weight), *heads[1:]


def _widths(self: Any) -> tuple[int, int]:
    return self.qk_nope_head_dim, self.v_head_dim


def _written_out(self: Any, c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """k [B, S, H, nope + P] and v [B, S, H, V]"""
    k, v = self.kv_b_proj(c).unflatten(-1, (-1, sum(_widths(self)))).split(_widths(self), -1)
    return torch.cat([k, r.expand(-1, -1, k.shape[2], -1)], -1), v


def _attend_latents(
    self: Any,
    rows: Rows,
    cache: Any,
    heads: tuple[Any, ...],
    selected: Tensor,
    single: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """What o_proj makes of attention to keys and values written out, or of a few tokens to latents
    in a cache. heads: q, c and r of _projected. single: lists [B, T, N] of keys instead of blocks.
    """
    q, c, r = heads
    names, T = code_of(type(self).forward).co_names, rows.size[1]
    if cache is not None and names.index("expand_kv") > names.index("update"):
        new = rows.unpack(c)[:, None], rows.unpack(r).transpose(1, 2)
        every, turned = cache.update(*new, self.layer_idx)
        if every.shape[2] != T:
            c, r = every[:, 0], turned.transpose(1, 2)
            few = T <= RECURRENT_UP_TO and not torch.is_grad_enabled()
            if few and plain_linear(self.kv_b_proj):
                q, w_v = absorbed(q, self.kv_b_proj.weight, *_widths(self))
                latent = torch.cat([c, r[:, :, 0]], -1)
                single = selected[:, :, 0] if single is None else single
                own = {"width": c.shape[-1], "scale": self.scaling, "selected": single}
                o = torch.einsum("bthr,hvr->bthv", latent_attention(q, latent, **own), w_v)
                return self.o_proj(o.flatten(-2))
        cache = None
    options |= {"selected": selected}
    o = _attend(self, rows, cache, (q, *_written_out(self, c, r)), options)
    return rows.unpack(self.o_proj(o))


def _listed(tokens: Tensor | None, rows: Rows) -> Tensor:
    """Lists [B or 1, T, 1, N] as packed, of their sequence's tokens, of lists [B, T, N] of a row's;
    negative is none."""
    if tokens is None:
        raise ValueError("prev_topk_indices: want what a layer before has selected, got None")
    if rows.cuts is None:
        return tokens[:, :, None]
    first, place, order = _places(rows)
    rank = place if order is None else torch.empty_like(order).index_copy(0, order, place)
    lists = rows.pack(tokens)[0]
    begin = (place if order is None else order) // rows.size[1] * rows.size[1]
    at = rank[begin[:, None] + lists.clamp(min=0)] - first[:, None]
    return torch.where(lists < 0, -1, at).int()[None, :, None]


def _tokens(lists: Tensor, rows: Rows) -> Tensor:
    """The reverse of _listed, of lists [B or 1, T, N]."""
    if rows.cuts is None:
        return lists
    first, _, order = _places(rows)
    at = first[:, None] + lists[0].clamp(min=0)
    at = (at if order is None else order[at]) % rows.size[1]
    return rows.unpack(torch.where(lists < 0, -1, at[None]).int())


def _places(rows: Rows) -> tuple[Tensor, Tensor, Any]:
    """Of packed tokens: the first of each one's sequence, their own places, and rows.order."""
    number, cuts = rows.size[0] * rows.size[1], rows.cuts.long()
    place = torch.arange(number, device=cuts.device)
    at = torch.searchsorted(cuts[1:].contiguous(), place, right=True).clamp(max=len(cuts) - 2)
    return cuts[at], place, rows.order


def train_indexers(model: nn.Module, weight: float = 1.0) -> int:
    """Has the indexers of a patched model learn what its attention looks at: in training each adds
    weight times ops.index_loss to the loss, which reaches its own parameters alone.

    Transformers' own have no gradient. The value of a layer's last call is indexer.index_loss.

    Args:
        weight: 0 ends it.

    Returns:
        How many indexers there are.
    """
    checks.expect_not_negative("weight", weight)
    found = [x for x in model.modules() if type(x).__name__ in FORWARDS]
    indexers: list[Any] = [x.indexer for x in found if x.indexer is not None]
    for own in indexers:
        own.slipstream_weight = float(weight)
    return len(indexers)


def _weight(self: Any, cache: Any) -> float:
    trains = self.training and torch.is_grad_enabled() and cache is None
    return getattr(self.indexer, "slipstream_weight", 0.0) if trains else 0.0


def _with_loss(own: Any, q: Tensor, loss: Tensor, weight: float) -> Tensor:
    """q, through whose gradient that of the loss goes on its way."""
    own.index_loss = loss.detach()
    return with_loss(q, loss, weight)


def _begin(self: Any, x: Tensor, mask: Any, cache: Any, kwargs: dict[str, Any]) -> tuple[Any, Rows]:
    """The cache and the rows of a call.

    Raises:
        NotImplementedError: ours does not take it; nothing is written into the cache yet.
        RuntimeError: nor does transformers' own, for the mask has no entries.
    """
    rows = rows_of(kwargs, x)
    why = _refusal(self, mask, cache, rows, kwargs)
    by_entry = masks.indexed(type(self.config).__module__)
    if why is not None and by_entry and isinstance(mask, Tensor) and masks.is_rule_mask(mask):
        text = "transformers' own reads a mask's entries, as attn_implementation='eager' makes"
        raise RuntimeError(f"{why}: {text}")
    if why is not None:
        raise NotImplementedError(why)
    return cache, rows


def _refusal(self: Any, mask: Any, cache: Any, rows: Rows, kwargs: dict[str, Any]) -> str | None:
    own = self.indexer
    if kwargs.get("output_attentions"):
        return "output_attentions: no probabilities are made"
    if self.training and self.attention_dropout:
        return "attention_dropout: selected attention has none"
    sizes = (getattr(own, x, None) for x in ("compress_ratio", "block_size", "index_kpool"))
    block = next((x for x in sizes if x is not None), 1)
    if block not in (1, 4, 16, 64, 128):
        return f"blocks of {block} keys"
    if own is not None and getattr(own, "local_blocks", 0) > getattr(own, "topk_blocks", 0):
        return "more local blocks than are listed"
    if cache is None:
        return None
    layer = cache.layers[self.layer_idx]
    if isinstance(layer, StaticLayer):
        return "a static cache"
    if layer.get_seq_length() and rows.cuts is not None:
        layer.slipstream_padded = True
        return "packed sequences or padding behind a cache"
    if hasattr(own, "index_kpool") and _has_padding(layer, rows):
        return "padding in a cache"
    if layer.get_seq_length() and not _sees_all(mask):
        return "padding in a cache"
    return None


def _has_padding(layer: Any, rows: Rows) -> bool:
    """Whether a cache whose indexer's keys end in a mark of tokens has some that are padding."""
    if not layer.get_seq_length():
        layer.slipstream_padded = rows.order is not None
        return False
    known = getattr(layer, "slipstream_padded", None)
    if known is None:
        known = layer.slipstream_padded = not bool(layer.indexer_keys[..., -1].all())
    return known


def _sees_all(mask: Any) -> bool:
    """Whether the last query of a mask [B, 1, T, S] or [B, S] sees all keys; asked once a mask."""
    if not isinstance(mask, Tensor):
        return True
    if masks.is_rule_mask(mask):
        return mask.shape[3] == 0
    known = getattr(mask, "slipstream_sees_all", None)
    if known is None:
        last = mask if mask.dim() == 2 else mask[:, :, -1]
        seen = last if last.dtype == torch.bool or mask.dim() == 2 else last == 0
        known = mask.slipstream_sees_all = bool(seen.all())  # pyright: ignore
    return known


def _rotary(self: Any) -> Callable[..., Any]:
    """The function of its module that rotates the features that its tables have."""
    return sys.modules[type(self).__module__].apply_rotary_pos_emb


def _of_rows(table: Tensor, x: Tensor) -> Tensor:
    return table.expand(len(x), -1, -1)


def _all_keys(every: Tensor, new: Tensor, tokens: int) -> Tensor:
    """What an indexer reads of the cache: all of it, or what is new if there was none before, which
    may be packed."""
    return new if every.shape[1] == tokens else every


def _lengths(keys: Tensor, rows: Rows, tokens: int) -> Tensor | None:
    """Of keys that are more than the queries."""
    if rows.cuts is not None or keys.shape[1] == tokens:
        return None
    return torch.full((len(keys),), keys.shape[1], device=keys.device)


def _attend(
    self: Any, rows: Rows, cache: Any, heads: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]
) -> Tensor:
    """[B, T, H K] of q, k and v as packed."""
    q, k, v = heads
    if cache is not None:
        new = [rows.unpack(y).transpose(1, 2) for y in (k, v)]
        every = cache.update(*new, self.layer_idx)
        if every[0].shape[2] != new[0].shape[2]:
            k, v = (y.transpose(1, 2) for y in every)
    q, k = q.to(v.dtype), k.to(v.dtype)
    return attention(q, k, v, scale=self.scaling, cu_seqlens=rows.cuts, **options).flatten(-2)


FORWARDS: dict[str, Callable] = {
    "DeepseekV32Attention": deepseek_v32,
    "Glm5NextTextAttention": glm5_next,
    "GlmMoeDsaAttention": glm_moe_dsa,
    "Qwen4ExpTextAttention": qwen4_exp,
    "MiniMaxM3VLAttention": minimax_m3,
}
