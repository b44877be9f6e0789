"""What is packed in rows of tokens, and what is padding, for mixers that run on them: Rows."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.integrations import linear_mixers
from slipstream.integrations.linear_mixers import running


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

    @property
    def one(self) -> bool:
        """A token of each row, for which plain torch launches less."""
        return self.size[1] == 1 and self.cuts is None

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

    def enter(self, state: Tensor | None, new: float = 0.0) -> Any:
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
    seq_idx, real = linear_mixers.sequences_of(kwargs, B, T), running.now.real_of_layer
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
    # what a caller writes into a tensor of inference mode is not counted
    if key.is_inference() and running.now.real_of_layer is None:
        return _find_rows(seq_idx, real, B, T)
    version = 0 if key.is_inference() else key._version
    beside = None if real is None else seq_idx
    found = getattr(key, "slipstream_rows", None)
    if found is None or found[0] != version or found[1] is not beside:
        found = version, beside, _find_rows(seq_idx, real, B, T)
        key.slipstream_rows = found  # every layer asks
    return found[2]


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
    if tokens.shape[1] == 1:
        return None
    real = mask[:, -tokens.shape[1] :].bool()
    return None if not linear_mixers.is_unreadable(real) and bool(real.all()) else real
