"""Arguments of the models' forward that transformers, PEFT and TRL pass to every model.

    output_attentions            None or False: the mixers make no attention weights
    cache_position               the cache itself counts its tokens
    token_type_ids               the model has no embedding of segments
    max_length_q, max_length_k   follow from the offsets
    cu_seq_lens_q, cu_seq_lens_k, seq_idx   where packed sequences begin: packing.py

Any other one is an error unless it is None: a misspelled argument would do nothing otherwise.
"""

import functools
import inspect
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.models.cache import StateCache
from slipstream.runtime import trees
from slipstream.runtime.token_ids import clamped, expect_ids

TENSORS = ("input_ids", "inputs_embeds", "labels", "attention_mask", "position_ids", "cu_seqlens")
TENSORS += ("parents",)
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
FLAGS = ("use_cache", "skip_logits", "output_hidden_states")
_WITHOUT_EFFECT = ("cache_position", "token_type_ids", "max_length_q", "max_length_k")


def check_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Returns those that PACKING names, and refuses others that would change the result.

    Raises:
        NotImplementedError: output_attentions. TypeError: an argument that is not known.
    """
    for name, value in given.items():
        if value is None or name in (*PACKING, *_WITHOUT_EFFECT):
            continue
        if name != "output_attentions":
            raise TypeError(f"{name}: unexpected argument of the model, got {value!r}")
        if value:
            raise NotImplementedError(
                "output_attentions: want None or False, since the mixers make no attention "
                f"weights, got {value!r}"
            )
    return {name: given[name] for name in PACKING if given.get(name) is not None}


def checked(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a model's forward, so that it checks the types of its arguments first.

    Raises:
        TypeError, ValueError: the first such argument, by its name.
    """
    names = list(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args)), **kwargs}
        _expect_tensors({name: given[name] for name in (*TENSORS, *PACKING) if name in given})
        for name in FLAGS:
            x = given.get(name)
            if x is not None and not isinstance(x, int):
                raise TypeError(f"{name}: want a bool or None, got {type(x).__name__}")
        if (embedded := given.get("inputs_embeds")) is not None:
            _expect_embedded(embedded, self.config.hidden_size)
        if (labels := given.get("labels")) is not None:
            _expect_labels(labels, given.get("input_ids"), embedded)
        _expect_items("num_items_in_batch", given.get("num_items_in_batch"))
        _expect_places(given.get("logits_to_keep"))
        if given.get("parents") is not None:
            packed = (given.pop(name, None) for name in ("cu_seqlens", "parents", "context"))
            _, given["context"] = trees.context_of(*packed)
            args, kwargs = (), given
        if given.get("context") is not None:
            _expect_none_beside_a_context(given)
        return forward(self, *args, **kwargs)

    return call


def _expect_tensors(given: dict[str, object]) -> None:
    """Refuses sparse tensors, and meta tensors beside others."""
    first = None
    for name, x in given.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: want a torch.Tensor or None, got {type(x).__name__}")
        if x.layout != torch.strided or x.is_nested:
            kind = "nested" if x.is_nested else x.layout
            raise TypeError(f"{name}: want a dense tensor, got one that is {kind}")
        first = x if first is None else first
        if x.is_meta != first.is_meta:
            there = f"{first.device}, got {x.device}"
            raise ValueError(f"{name}: want the device of the tokens, {there}")


def _expect_none_beside_a_context(given: dict[str, object]) -> None:
    for name in ("attention_mask", "cu_seqlens", *PACKING, "cache", "past_key_values", "use_cache"):
        x = given.get(name)
        if x is not None and x is not False:
            raise ValueError(f"{name}: want None beside a context, which says where sequences are")


def _expect_embedded(x: Tensor, width: int) -> None:
    if x.dim() != 3 or x.shape[-1] != width:
        raise ValueError(f"inputs_embeds: want shape (B, T, {width}), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"inputs_embeds: want a floating dtype, got {x.dtype}")


def _expect_labels(labels: Tensor, ids: Tensor | None, embedded: Tensor | None) -> None:
    if labels.dim() != 2:
        raise ValueError(f"labels: want shape (B, T), got {tuple(labels.shape)}")
    of = ids if ids is not None else embedded
    if of is not None and of.dim() > 1 and labels.shape != of.shape[:2]:
        want = f"want shape {tuple(of.shape[:2])} of the tokens, got {tuple(labels.shape)}"
        raise ValueError(f"labels: {want}")
    if labels.dtype != torch.int64:
        raise TypeError(f"labels: want torch.int64, got {labels.dtype}")


def _expect_items(name: str, x: object) -> None:
    """A tensor may be 0, as transformers' Trainer counts a batch without labels: it is not read."""
    one = isinstance(x, Tensor) and x.numel() == 1 and not x.is_complex()
    if x is None or one:
        return
    if not isinstance(x, int | float | numbers.Real):
        kind = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: want a number or a tensor of one, got {kind}")
    if not torch.compiler.is_compiling() and not float(x) > 0:
        raise ValueError(f"{name}: want more than 0, which the loss is divided by, got {x}")


def per_item(loss: Tensor, items: Tensor | int | None) -> Tensor:
    """A sum over items, or a mean if `items` is None, as a mean; 0 is the number for no labels.

    Not the larger of `items` and 1: each rank of a context has a part of the number.
    """
    if isinstance(items, Tensor):
        items = items.to(loss.device)
        items = items.masked_fill(items == 0, 1)
    return loss if items is None else loss / items


def _expect_places(x: object) -> None:
    if isinstance(x, Tensor):
        if x.dim() != 1 or x.is_floating_point() or x.is_complex():
            kind = f"{x.dtype} {tuple(x.shape)}"
            raise TypeError(f"logits_to_keep: want integers or bools [N], got {kind}")
    elif x is not None and not isinstance(x, int | slice | list):
        raise TypeError(f"logits_to_keep: want an integer or places, got {type(x).__name__}")
    elif isinstance(x, int) and not torch.compiler.is_compiling() and x < 0:
        raise ValueError(f"logits_to_keep: want 0 or more of the last positions, got {x}")


def at_places(h: Tensor, places: Any) -> Tensor:
    """The hidden states [B, T, D] that logits are wanted of: the last n, or those at places.

    Raises:
        ValueError: names a place that is none; on CUDA the next call does.
    """
    if places is None:
        return h
    if isinstance(places, int):
        return h[:, -places:]
    if isinstance(places, slice):
        return h[:, places]
    at, tokens = torch.as_tensor(places, device=h.device), h.shape[1]
    if at.numel():  # as a list, empty ones have torch's default dtype
        _expect_places(at)
    if at.dtype == torch.bool:
        if at.shape[0] != tokens:
            raise ValueError(f"logits_to_keep: want {tokens} bools, got {at.shape[0]}")
        return h[:, at]
    at = at.long()
    at = torch.where((at < 0) & (at >= -tokens), at + tokens, at)
    if not torch.compiler.is_compiling():
        expect_ids("logits_to_keep", at, tokens)
    return h.index_select(1, clamped(at, tokens))


def shape_of(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[int, int]:
    """Rows and tokens.

    Raises:
        ValueError: there are both or none, or the ids have another shape.
    """
    if inputs_embeds is not None and input_ids is None:
        return inputs_embeds.shape[0], inputs_embeds.shape[1]
    if input_ids is None or inputs_embeds is not None:
        raise ValueError("input_ids: want either input_ids or inputs_embeds, got both or none")
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids: want shape (B, T), got {tuple(input_ids.shape)}")
    return input_ids.shape[0], input_ids.shape[1]


def the_cache(
    cache: StateCache | None, past_key_values: StateCache | None, num_layers: int
) -> StateCache | None:
    """The cache under either of its two names; num_layers: how many layers it must have."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache: want it or past_key_values, its older name, got both")
    found = past_key_values if cache is None else cache
    if found is not None:
        _expect_cache(found, num_layers)
    return found


def _expect_cache(cache: object, num_layers: int) -> None:
    if not isinstance(cache, StateCache):
        raise TypeError(
            "cache (past_key_values): want a slipstream.models.StateCache, got "
            f"{type(cache).__name__}; pass None and the model makes its own"
        )
    if len(cache.layers) != num_layers:
        raise ValueError(
            f"cache (past_key_values): want a cache of {num_layers} layers, got {len(cache.layers)}"
        )


def cache_of_call(
    model: Any, cache: StateCache | None, use_cache: bool | None
) -> StateCache | None:
    """The cache that is given, or a new one if one is wanted."""
    if cache is None and not use_cache:
        return None
    if cache is None:
        return StateCache(len(model.layers))
    cache._own(detach=False)  # what inference mode made is written here, graphs have read it
    return cache


def expect_state(state: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Returns the state that a block made beside a cache. A checkpointed one returns none:
    transformers 5.17 checkpoints blocks without gradients too, 5.24 does not.

    Raises:
        ValueError: there is none.
    """
    if state is None:
        raise ValueError(
            "use_cache: want False, and no cache, of a model that trains with gradient "
            "checkpointing; call eval() or gradient_checkpointing_disable() first"
        )
    return state


def expect_rows(cache: StateCache | None, sequences: int) -> None:
    """Raises ValueError for a cache that holds the states of another number of sequences."""
    if cache is not None and cache.rows not in (0, sequences):
        raise ValueError(
            f"cache (past_key_values): want a row for each of {sequences} sequences, got "
            f"{cache.rows}. cache.batch_repeat_interleave(n) repeats every row"
        )
