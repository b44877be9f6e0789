"""attn_implementation="slipstream": softmax attention of transformers' models by ops.attention.

Importing this registers two functions. transformers calls the first once a forward pass, to make
a mask, and the second in every layer, with that mask. masks.py says what a mask holds: it alone
decides which keys a query sees, and attributes of a layer (is_causal, sliding_window) are not read.
A mask that masks.py cannot write in a few numbers goes through plain torch, dense.

A model whose layers do not use transformers' AttentionInterface keeps its own attention, and a
warning names it: PreTrainedModel.get_correct_attn_implementation is wrapped to that end.
"""

import ast
import logging
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from slipstream.common import extras

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask
except ModuleNotFoundError as error:
    raise extras.missing("slipstream.integrations.transformers", error, "interop") from None

from slipstream.integrations import linear_mixers, masks, usage
from slipstream.integrations.context import call_in_context
from slipstream.integrations.hub import register_kernels
from slipstream.integrations.indexed_attention import train_indexers
from slipstream.integrations.masks import Query, Rule, build_mask, cuts_by_position, is_rule_mask
from slipstream.integrations.patching import patch, unpatch
from slipstream.ops.attention import attention
from slipstream.ops.flash_attn import flash_attn_with_kvcache
from slipstream.runtime.context_parallel import ContextParallel

__all__ = [
    "NAME", "call_in_context", "patch", "register_kernels", "slipstream_attention",
    "slipstream_mask", "train_indexers", "unpatch",
]  # fmt: skip

NAME = "slipstream"
# with more queries than this, reading all keys for all of them at once does not pay
DECODED_QUERIES = 16
# arguments that change no result: is_causal and sliding_window are in the mask, and some models
# hand on all that they were given
UNREAD = frozenset(
    (
        "cache_position", "deterministic", "grid_thw", "image_grid_thw", "input_ids",
        "inputs_embeds", "is_causal", "labels", "logits_to_keep", "max_length_k", "max_length_q",
        "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits",
        "pixel_values", "pixel_values_videos", "return_dict", "shift_labels", "sliding_window",
        "use_cache", "video_grid_thw",
    )
)  # fmt: skip
# models that compute with the entries of a mask without a word to the mask interface, by what makes
# the mask that they want: bool, or to be added
DENSE_MODELS: dict[str, Callable] = {
    "bigbird_pegasus": eager_mask,
    "deepseek_v4": eager_mask,
    "parakeet_encoder": sdpa_mask,
    "nemotron_asr_streaming_encoder": sdpa_mask,
}

logger = logging.getLogger(__name__)


def slipstream_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Which keys each query sees, as masks.py writes it.

    Args:
        q_length, kv_length: T queries and S keys, with key 0 at token kv_offset and query 0 at
            q_offset; on a device if the cache is static.
        mask_function: (batch, head, query, key) -> whether it is seen, padding apart.
        attention_mask: bool [B, tokens], False where there is padding.
        local_size: the window or the size of the chunks in mask_function.
        allow_is_causal_skip, allow_is_bidirectional_skip: False if the caller computes with the
            entries of the mask.
        use_vmap: mask_function takes numbers, not tensors.
    """
    dense = DENSE_MODELS.get(getattr(config, "model_type", ""))
    if use_vmap or dense is not None:
        pattern = None
    elif torch.compiler.is_compiling():
        pattern = masks.traced_pattern_of(
            mask_function, local_size, config, allow_is_bidirectional_skip, allow_is_causal_skip
        )
    else:
        pattern = masks.pattern_of(mask_function)
    if pattern is not None:
        causal = pattern.rule.right == 0
        may_skip = allow_is_causal_skip if causal else allow_is_bidirectional_skip
        # packed rows and a step on a static cache: transformers allows no None there
        wanted = masks.wants_entries(type(config).__module__)
        step = q_length == 1 and causal and not wanted
        may_skip = may_skip or step or (pattern.cuts and not wanted)
        padding = None
        if attention_mask is not None:
            padding = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        call = Query(batch_size, q_length, kv_length, q_offset, kv_offset, padding, device)
        lists = isinstance(q_offset, int) and not torch.compiler.is_compiling()
        lists = not may_skip and lists and masks.indexed(type(config).__module__)
        mask = build_mask(pattern, mask_function, call) if may_skip or lists else False
        # behind padding transformers' own attention runs
        own = lists and isinstance(mask, Tensor) and mask.shape[3] > 0 and q_length < kv_length
        if not isinstance(mask, bool) and not own:
            return mask
    if not torch.compiler.is_compiling():
        _say_dense()
    return (dense or sdpa_mask)(
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
        **kwargs,
    )


@usage.counted("transformers", "attn_implementation")
def slipstream_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    seq_idx: Tensor | None = None,
    position_ids: Any = None,
    context: ContextParallel | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer: query [B, H, T, D], key [B, HKV, S, D], value [B, HKV, S, DV] -> [B, T, H, DV].

    Args:
        attention_mask: as masks.py has it, or dense, [B or 1, H or 1, T, S], bool or added.
        s_aux: [H], sinks; `sinks` [B, H, T, 1] are another for each query.
        position_bias: [B or 1, H or 1, T, S], added to the scores.
        indices: [B, T, N], the only keys that a query sees of those that the mask shows; negative
            is none. block_indices: [B, G, T, N], the same of blocks of module.indexer.block_size
            keys, for H / G heads each.
        cu_seq_lens_q, cu_seq_lens_k: offsets of packed sequences, with the B rows one behind the
            other; they cut what the mask lets see each other.
        seq_idx: int [B, T], the sequences as numbers in place of offsets; not read beside them.
        position_ids: int [B or 1, T]; where they do not rise a sequence begins, unless offsets or
            seq_idx say what is packed. Read under a causal mask over as many keys as queries; not
            while torch.compile traces or a CUDA graph is captured.
        context: the tokens are this rank's (context.py), or those of prefix trees, as TRL's fields
            tree_kv_index, tree_cu_seqlens_q and tree_cu_seqlens_k say it; offsets and cuts are not
            read.

    Raises:
        NotImplementedError: an argument that is not known here.
        ValueError: offsets beside a mask that they cannot cut, or a mask of another shape.
    """
    context = linear_mixers.context_of({**kwargs, "context": context})
    for name, given in kwargs.items():
        if given is not None and name not in UNREAD and not name.startswith("tree_"):
            raise NotImplementedError(
                f"{name}: attn_implementation={NAME!r} does not take this argument of "
                f"{type(module).__name__}; use another attn_implementation"
            )
    cu_seq_lens_q, seq_idx = linear_mixers.own_sequences(module, query, cu_seq_lens_q, seq_idx)
    # norms in float32 leave q and k wider than v
    query, key = query.to(value.dtype), key.to(value.dtype)
    more = (softcap, s_aux, position_bias, sinks, indices, block_indices, cu_seq_lens_q, seq_idx)
    alone = more == (None,) * len(more) and not dropout and context is None
    if alone and masks.sees_few_keys(query, key, value, attention_mask):
        grouped: Any = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
        by_torch = torch.nn.functional.scaled_dot_product_attention
        return by_torch(query, key, value, scale=scaling, **grouped).transpose(1, 2), None
    if s_aux is not None:
        sinks = s_aux
    options: dict[str, Any] = {"softcap": softcap, "sinks": sinks, "dropout_p": float(dropout)}
    selected = _selected(module, query, key, indices, block_indices)
    ruled = attention_mask is None or is_rule_mask(attention_mask)
    dense = not ruled or position_bias is not None or selected is not None
    dense = dense or (sinks is not None and sinks.dim() > 1)
    if context is not None:
        if dense:
            raise NotImplementedError("context: want a causal or windowed mask, and no bias")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        rule = Rule() if attention_mask is None else Rule.of_size(attention_mask.shape[1])
        options |= {"scale": scaling, "causal": False, "window_size": tuple(rule)}
        return attention(q, k, v, context=context, **options), None
    if seq_idx is None and cu_seq_lens_q is None:
        cu_seq_lens_q = cuts_by_position(attention_mask, position_ids, query, key)
    if seq_idx is not None and query.shape[2] != key.shape[2]:
        raise ValueError(f"seq_idx: want as many keys as queries, got {query.shape}, {key.shape}")
    if dense:
        mask = _dense_mask(attention_mask, query, key)
        for visible_keys in (selected, _within(cu_seq_lens_q, seq_idx, query, key)):
            if visible_keys is not None:
                mask = _both(mask, visible_keys)
        return _dense(query, key, value, mask, position_bias, scaling, **options), None
    # learned queries of one row are every row's
    q, k, v = (x.transpose(1, 2) for x in (query.expand(key.shape[0], -1, -1, -1), key, value))
    rule = Rule() if attention_mask is None else Rule.of_size(attention_mask.shape[1])
    options |= {"scale": scaling, "causal": False, "window_size": tuple(rule)}
    cuts = None
    if attention_mask is not None and attention_mask.shape[2] > 1:
        cuts = attention_mask[0, 0, :, 0]
    if seq_idx is not None and cu_seq_lens_q is None:
        cu_seq_lens_q = linear_mixers.offsets_of(seq_idx).int()
    if cu_seq_lens_q is not None:
        _check_cuts(attention_mask, rule, q, k)
        if cuts is None:
            same = cu_seq_lens_k is None
            return _packed(q, k, v, cu_seq_lens_q, None if same else cu_seq_lens_k, options), None
        cuts = torch.cat([cuts, cu_seq_lens_q.to(cuts.dtype)]).sort().values
    if cuts is not None:
        return _packed(q, k, v, cuts, None, options), None
    if attention_mask is None or attention_mask.shape[3] == 0:
        return _plain(q, k, v, None, None, options), None
    used = attention_mask[:, 0, 0].expand(q.shape[0], -1).unbind(1)
    begin, end = used if len(used) == 2 else (None, used[0])
    return _plain(q, k, v, begin, end, options), None


def _check_cuts(mask: Tensor | None, rule: Rule, q: Tensor, k: Tensor) -> None:
    """Whether offsets may cut what a mask lets see each other."""
    if mask is not None and mask.shape[2] == 1 and mask.shape[3]:
        raise ValueError("cu_seq_lens_q: want no padding beside it")
    if mask is not None and mask.shape[2] > 1 and mask.shape[3] == 2:
        raise ValueError(
            "cu_seq_lens_q: want position_ids of the packed sequences beside it and "
            "use_cache=False, so that chunks are counted from the start of a sequence"
        )
    if rule.positioned and q.shape[1] != k.shape[1]:
        raise ValueError(f"cu_seq_lens_q: want as many keys as queries, got {q.shape}, {k.shape}")


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
    few = T <= DECODED_QUERIES and T < S and not grads and not options["dropout_p"]
    if few and (begin is not None or q.is_cuda):
        renamed = {("softmax_scale" if x == "scale" else x): y for x, y in options.items()}
        del renamed["dropout_p"]
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
    # queries that stand on padding, if it matters where they stand
    before = begin * 0
    if tuple(options["window_size"]) != (-1, -1):
        before = (begin - (end - T)).clamp(0, T)
    cu_q = _bounds(row, before, begin * 0 + T, T)
    cu_k = _bounds(row, begin, end, S)
    return _packed(q, k, v, cu_q, cu_k, options)


def _bounds(row: Tensor, begin: Tensor, end: Tensor, length: int) -> Tensor:
    cuts = torch.stack([begin, end, begin * 0 + length], 1).int() + row[:, None] * length
    return torch.cat([cuts.new_zeros(1), cuts.flatten()])


def _packed(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor | None, options: dict[str, Any]
) -> Tensor:
    B, T = q.shape[:2]
    q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
    if cu_k is cu_q or cu_k is None:
        o = attention(q, k, v, cu_seqlens=cu_q, **options)
    else:
        o = attention(q, k, v, cu_seqlens=cu_q, cu_seqlens_k=cu_k, **options)
    return o.unflatten(1, (B, T))[0]


def _selected(
    module: torch.nn.Module, q: Tensor, k: Tensor, indices: Tensor | None, blocks: Tensor | None
) -> Tensor | None:
    """Top-k attention: the bool [B, H or 1, T, S] of the keys that a query sees, if not all."""
    if indices is None and blocks is None:
        return None
    S = k.shape[2]
    if blocks is not None:
        indexer: Any = module.indexer
        size = indexer.block_size
        found = _scatter(blocks, -(-S // size)).repeat_interleave(size, -1)[..., :S]
        return found.repeat_interleave(q.shape[1] // blocks.shape[1], 1)
    assert indices is not None
    return _scatter(indices, S)[:, None]


def _scatter(indices: Tensor, size: int) -> Tensor:
    """[..., N] in [0, size), negative for none -> bool [..., size]"""
    seen = torch.zeros(*indices.shape[:-1], size + 1, dtype=torch.bool, device=indices.device)
    indices = indices.long()
    return seen.scatter_(-1, indices.where(indices >= 0, size), True)[..., :size]


def _within(cuts: Tensor | None, seq_idx: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bool [B, 1, T, S] of keys in a query's own sequence, of those packed in rows."""
    if cuts is not None:
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"cu_seq_lens_q: want as many keys as queries beside a dense mask, got {q.shape}, "
                f"{k.shape}"
            )
        seq_idx = linear_mixers.sequences_of({"cu_seq_lens_q": cuts}, k.shape[0], k.shape[2])
    if seq_idx is None:
        return None
    return seq_idx[:, None, :, None] == seq_idx[:, None, None, :]


def _both(mask: Tensor | None, selected: Tensor) -> Tensor:
    """A dense mask, bool or added, within the selected keys."""
    if mask is None:
        return selected
    if mask.dtype == torch.bool:
        return mask & selected
    return mask.masked_fill(~selected, torch.finfo(mask.dtype).min)


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """Plain torch, [B, H, T, D] -> [B, T, H, DV], in float32 or wider."""
    S, dtype = k.shape[2], v.dtype
    with torch.autocast(q.device.type, enabled=False):
        if dtype != torch.float64:
            q, k, v = (x.float() for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        x = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT
        if softcap:
            x = softcap * (x / softcap).tanh()
        if bias is not None:
            x = x + bias[..., :S]
        if mask is not None and mask.dtype == torch.bool:
            # finite, so that a query that sees nothing has no NaN
            x = x.masked_fill(~mask, torch.finfo(x.dtype).min)
        elif mask is not None:
            x = x + mask
        if sinks is not None:
            beside = sinks.to(x.dtype).view(-1, 1, 1) if sinks.dim() == 1 else sinks.to(x.dtype)
            beside = beside.expand(*x.shape[:-1], 1)
            x = torch.cat([x, beside], -1)
        p = torch.nn.functional.dropout(x.softmax(-1)[..., :S], dropout_p)
        return (p @ v).transpose(1, 2).contiguous().to(dtype)


def _dense_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """[B or 1, H or 1, T or 1, S], bool or floating."""
    if mask is None:
        return None
    (B, H, T, _), S = q.shape, k.shape[2]
    if is_rule_mask(mask):
        return masks.visible(mask, k.shape[0], T, S)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attention_mask: want bool or floating, got {mask.dtype}")
    mask = mask[..., :S]
    if any(n != 1 and n != m for n, m in zip(mask.shape, (max(B, k.shape[0]), H, T, S))):
        raise ValueError(
            f"attention_mask: want [{B} or 1, {H} or 1, {T} or 1, {S}], got {tuple(mask.shape)}"
        )
    return mask


@cache
def _say_dense() -> None:
    logger.warning("slipstream: a mask that is not causal, windowed, padded or packed is dense")


# a layer's choice of one of its own classes by name
OWN_CLASSES = "_CLASSES[config._attn_implementation]"


def uses_interface(model: type[PreTrainedModel]) -> bool:
    """Whether the attention of a class of models is looked up in transformers' AttentionInterface.

    It is not where a class has attention of its own, or a dictionary of them by name. Models
    inside of it that have a configuration of their own are asked by themselves.
    """
    if not model._can_set_attn_implementation():
        return False
    source = masks.modeling_source(model.__module__)
    return OWN_CLASSES not in source or not _chooses_own_classes(model, source)


def _chooses_own_classes(model: type[PreTrainedModel], source: str) -> bool:
    """Whether the class, or one that it names and that has its configuration, does so."""
    nodes = {x.name: x for x in ast.parse(source).body if isinstance(x, ast.ClassDef)}
    todo, seen = [model.__name__], set[str]()
    while todo:
        name = todo.pop()
        other = getattr(sys.modules[model.__module__], name, None)
        if name in seen or name not in nodes or not isinstance(other, type):
            continue
        seen.add(name)
        if _has_other_config(other, model):
            continue
        if OWN_CLASSES in ast.unparse(nodes[name]):
            return True
        todo += [x.id for x in ast.walk(nodes[name]) if isinstance(x, ast.Name)]
    return False


def _has_other_config(inner: type, model: type[PreTrainedModel]) -> bool:
    """Whether a class is a model with a configuration of its own, not that of a base of both."""
    if not issubclass(inner, PreTrainedModel) or inner.config_class is model.config_class:
        return False
    bases = (x for x in inner.__mro__ if getattr(x, "config_class", None) is inner.config_class)
    return not issubclass(model, list(bases)[-1])


@cache
def _say_own(model: str, own: str) -> None:
    logger.warning(
        "slipstream: %s does not use transformers' AttentionInterface and keeps its own "
        "attention, %r",
        model,
        own,
    )


def _keep_own_attention() -> None:
    """Lets models that do not use the interface keep what transformers would choose for them."""
    choose = PreTrainedModel.get_correct_attn_implementation

    @wraps(choose)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        if requested_attention != NAME or uses_interface(type(self)):
            return choose(self, requested_attention, is_init_check)
        own = choose(self, None, is_init_check)
        _say_own(type(self).__name__, own)
        return own

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


AttentionInterface.register(NAME, slipstream_attention)
AttentionMaskInterface.register(NAME, slipstream_mask)
_keep_own_attention()
