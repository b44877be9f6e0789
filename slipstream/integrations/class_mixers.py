"""Mixers that are classes of transformers' models with loops of their own, on our operators.

patch() puts the functions of FORWARDS in the place of forward of the classes of these names, and
METHODS into classes that lack them. A function has the arguments of the forward, by its names.

rows_of() says what is packed and what is padding; a mixer packs what it reads by it and unpacks
what it returns, so that sequences stay apart and states pass padding by, on either side.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.integrations import linear_mixers
from slipstream.integrations.linear_mixers import running
from slipstream.ops._fp32 import widen
from slipstream.ops.recurrent_step import recurrent_step
from slipstream.ops.simple_gla import chunk_simple_gla


class Rows(NamedTuple):
    """Rows [B, T] as one of several sequences, the tokens of padding behind all others.

    size: B, T. cuts: offsets [N+1] of the sequences; None if the rows stay as they are. first, last
    [B]: the sequence that a row begins with, and ends with. order: [B T], the token at each place;
    None without padding.
    """

    size: tuple[int, int]
    cuts: Any = None
    first: Any = None
    last: Any = None
    order: Any = None

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [1, B T, ...], or x."""
        if self.cuts is None:
            return x
        x = x.flatten(0, 1)
        return (x if self.order is None else x[self.order])[None]

    def unpack(self, x: Tensor) -> Tensor:
        """The reverse of pack."""
        if self.cuts is None:
            return x
        rows = (
            x[0] if self.order is None else torch.empty_like(x[0]).index_copy(0, self.order, x[0])
        )
        return rows.unflatten(0, self.size)

    def enter(self, state: Tensor | None, new: float = 0.0) -> Tensor | None:
        """The state before each sequence, of rows [B, ...]; `new` before those within a row."""
        if state is None or self.cuts is None:
            return state
        before = state.new_full((len(self.cuts) - 1, *state.shape[1:]), new)
        return before.index_copy(0, self.first, state)

    def leave(self, state: Tensor | None) -> Any:
        """The state after each row, of sequences [N, ...]."""
        return state if state is None or self.cuts is None else state[self.last]


def rows_of(kwargs: dict[str, Any], x: Tensor, mask: Any = None) -> Rows:
    """What is packed in x [B, T, ...], and what is padding. mask: [B, T], 0 at padding, for a layer
    whose model did not say.

    Raises:
        ValueError: another number of tokens is packed.
    """
    B, T = x.shape[:2]
    seq_idx, real = linear_mixers.sequences_of(kwargs, B, T), running.real_of_layer
    if real is None and isinstance(mask, Tensor) and mask.shape == (B, T):
        real = mask.bool()
    for name, given in (("seq_idx", seq_idx), ("attention_mask", real)):
        if given is not None and given.shape != (B, T):
            raise ValueError(f"{name}: want shape {(B, T)}, got {tuple(given.shape)}")
    if seq_idx is None and real is None:
        return Rows((B, T))
    key: Any = seq_idx if real is None else real
    if linear_mixers.is_unreadable(key):
        return _find_rows(seq_idx, real, B, T)
    found = getattr(key, "slipstream_rows", None)
    if found is None or found[0] is not seq_idx:
        found = seq_idx, _find_rows(seq_idx, real, B, T)
        key.slipstream_rows = found  # every layer asks
    return found[1]


def _find_rows(seq_idx: Tensor | None, real: Tensor | None, B: int, T: int) -> Rows:
    device = (seq_idx if real is None else real).device  # pyright: ignore[reportOptionalMemberAccess]
    number, order, row = B * T, None, torch.arange(B * T, device=device) // T
    bounds = torch.arange(B + 1, device=device) * T
    if real is not None:
        order = (~real.flatten()).int().argsort(stable=True)
        bounds, row = F.pad(real.sum(1).cumsum(0), (1, 0)), row[order]
    cuts, inner = bounds, bounds[:0]
    if real is not None:
        cuts = torch.cat([cuts, cuts.new_full((1,), number)])
    if seq_idx is not None:
        ids = seq_idx.flatten() if order is None else seq_idx.flatten()[order]
        begins = (ids[1:] != ids[:-1]) & (row[1:] == row[:-1])
        begins = F.pad(begins, (1, 0)) & (torch.arange(number, device=device) < bounds[-1])
        # offsets of a first sequence too, which is no cut within a row
        inner = linear_mixers.offsets_of_starts(begins)[:-1]
        cuts = torch.cat([cuts, inner]).sort().values
    at = torch.arange(B + 1, device=device) + torch.searchsorted(inner, bounds)
    return Rows((B, T), cuts, at[:-1], at[1:] - 1, order)


def padding_of(mask: Any, tokens: Any) -> Tensor | None:
    """bool [B, T], where there is none, of a mask of all tokens so far; None if there is none. One
    token is never padding."""
    if isinstance(mask, dict):  # of generate
        mask = mask.get("linear_attention", mask.get("conv"))
    if not isinstance(mask, Tensor) or not isinstance(tokens, Tensor) or mask.dim() != 2:
        return None
    real = mask[:, -tokens.shape[1] :].bool()
    if tokens.shape[1] == 1 or (not linear_mixers.is_unreadable(real) and bool(real.all())):
        return None
    return real


def _of(cache: Any, past_key_values: Any) -> Any:
    """The cache, by its name in this release or in older ones."""
    return past_key_values if cache is None else cache


def cache_call(call: Callable) -> Callable:
    """reorder_cache and reset of transformers' Cache, for the states that it does not know of."""

    @wraps(call)
    def replacement(self: Any, *args: Any, **kwargs: Any) -> None:
        call(self, *args, **kwargs)
        index = next((x for x in (*args, *kwargs.values())), None)
        for name in ("linear_cache", "slipstream_states"):
            states: Any = getattr(self, name, {})
            for at in range(len(states)) if isinstance(states, list) else states:
                states[at] = _moved(states[at], index)

    return replacement


def _moved(state: Any, index: Tensor | None) -> Any:
    """The rows `index` of a state or of several; zeros if None."""
    if not isinstance(state, Tensor):
        return type(state)(_moved(x, index) for x in state)
    return (
        torch.zeros_like(state) if index is None else state.index_select(0, index.to(state.device))
    )


def _scalar_decay(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None, rows: Rows, scale: float
) -> tuple[Tensor, Tensor]:
    """q, k [B, T, H, K], v [B, T, H, V] and g [H] or [B, T, H] as packed, state [B, H, K, V]. One
    token without gradients moves the state on in place."""
    state = None if state is None else widen(state)
    grads = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, g))
    if rows.size[1] == 1 and state is not None and not grads and rows.cuts is None:
        g = g.expand(q.shape[:3]) if g.dim() == 1 else g
        return recurrent_step(q, k, v, state=state, g=g, scale=scale), state
    each, all_tokens = (None, g) if g.dim() == 1 else (g, None)
    o, state = chunk_simple_gla(
        q, k, v, each, all_tokens, scale=scale, initial_state=rows.enter(state),
        output_final_state=True, cu_seqlens=rows.cuts,
    )  # fmt: skip
    return o, rows.leave(state)


def minimax(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Lightning attention: one decay a head, exp(-slope_rate)."""
    cache = _of(cache, past_key_values)
    rows = rows_of(kwargs, hidden_states, attention_mask)
    x = rows.pack(hidden_states)
    qkv = self.act_fn(self.qkv_proj(x)).unflatten(-1, (self.num_attention_heads, -1))
    state = None if cache is None else cache.get_linear_cache(self.layer_idx)
    decay = -widen(self.slope_rate.flatten())
    q, k, v = qkv.chunk(3, -1)
    o, state = _scalar_decay(q, k, v, decay, state, rows, 1.0)
    o = torch.sigmoid(self.output_gate(x)) * self.norm(o.flatten(2))
    if cache is not None:
        cache.set_linear_cache(self.layer_idx, state)
    return rows.unpack(self.out_proj(o)), state


FORWARDS: dict[str, Callable] = {"MiniMaxLightningAttention": minimax}
# class, method and function of what a class lacks
METHODS: tuple[tuple[str, str, Callable], ...] = ()
