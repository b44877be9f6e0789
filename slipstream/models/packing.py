"""Padded batches and packed ones: where the sequences of a batch lie.

Layers know one form of ragged batches: sequences packed one after another in a batch of one, with
offsets cu_seqlens [N+1]. Padding and several sequences in a row are brought into that form and
back. What says where sequences begin, the first that is given:

    cu_seqlens, cu_seq_lens_q    offsets in a batch of one
    seq_idx [1 or B, T]          the number of each token's sequence: it begins where that changes
    position_ids [1 or B, T]     it begins where position_ids[t] != position_ids[t - 1] + 1

Every row begins a sequence. Of the first two, several must agree; tensors on a GPU are not
compared, which would wait for it. Beside them, position_ids are nothing but positions.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Sequences(NamedTuple):
    """cu_seqlens [N+1]: offsets of the sequences, packed one after another. index [total]: places
    of their tokens in the flattened [B * T]; None is all of them."""

    cu_seqlens: Tensor
    index: Tensor | None = None

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [1, total, ...]"""
        flat = x.flatten(0, 1)
        return (flat if self.index is None else flat[self.index.to(x.device)])[None]

    def unpack(self, x: Tensor, batch: int, tokens: int, fill: int = 0) -> Tensor:
        """[1, total, ...] -> [B, T, ...], `fill` at the padding"""
        flat = x.flatten(0, 1)  # of x[0] the gradient would be a copy among zeros
        if self.index is not None:
            whole = x.new_full((batch * tokens, *x.shape[2:]), fill)
            # of a model on several devices, the last layer's may be another
            flat = whole.index_copy(0, self.index.to(x.device), flat)
        return flat.unflatten(0, (batch, tokens))

    def ends_alone(self, columns: int) -> bool:
        """Whether there is one sequence, whose tokens are the last of `columns` columns."""
        if self.cu_seqlens.shape[0] != 2 or self.index is None:
            return self.cu_seqlens.shape[0] == 2
        tokens = self.index.shape[0]
        return tokens > 0 and int(self.index[0]) == columns - tokens

    def absent(self, batch: int, tokens: int) -> Tensor | None:
        """The padding, bool [B, T]; of packed sequences how many columns of T each has no token in,
        [N]; None if there is none."""
        if self.cu_seqlens.shape[0] - 1 != batch:
            return tokens - self.cu_seqlens.diff()
        if self.index is None:
            return None
        padding = self.index.new_ones(batch * tokens, dtype=torch.bool)
        return padding.index_fill(0, self.index, False).view(batch, tokens)


class Absent:
    """Columns of a cache in which a row has no token, as Sequences.absent has them: they are
    forgotten with the last columns.

    calls: the columns before one that had such, how many it had, and what is absent.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, Tensor]] = []

    def add(self, begin: int, columns: int, absent: Tensor | None) -> None:
        if absent is not None:
            self.calls.append((begin, columns, absent))

    def after(self, columns: int) -> Tensor | None:
        """Counts the absent ones of the columns after so many, [N].

        Raises:
            ValueError: packed sequences lie on both sides.
        """
        found = None
        for begin, count, absent in self.calls:
            if absent.dim() == 1 and begin < columns < begin + count:
                raise ValueError(
                    f"crop: packed sequences, which begin after {begin} columns, go as a whole, "
                    f"got {columns} columns to keep"
                )
            if columns < begin + count:
                part = absent
                if absent.dim() == 2:
                    part = absent[:, max(columns - begin, 0) :].sum(1, dtype=torch.int32)
                found = part if found is None else found + part
        return found

    def crop(self, columns: int) -> None:
        """Forgets all columns after so many."""
        self.calls = [
            (begin, min(count, columns - begin), x if x.dim() == 1 else x[:, : columns - begin])
            for begin, count, x in self.calls
            if begin < columns
        ]

    def map(self, move: Callable[[Tensor], Tensor]) -> "Absent":
        """Returns the same for other rows."""
        made = Absent()
        made.calls = [(begin, count, move(x)) for begin, count, x in self.calls]
        return made


def next_tokens(labels: Tensor, sequences: Sequences | None, ignored: int) -> Tensor:
    """Each position's target [B, T]: the label of the token after it in the same sequence."""
    if sequences is None:
        return F.pad(labels, (0, 1), value=ignored)[:, 1:]
    target = F.pad(sequences.pack(labels), (0, 1), value=ignored)[:, 1:]
    if target.shape[1]:
        # an empty sequence at the front has its last token at -1: that is the row's, ignored too
        last = (sequences.cu_seqlens[1:].long() - 1) % target.shape[1]
        target = target.index_fill(1, last, ignored)
    return sequences.unpack(target, *labels.shape, fill=ignored)


def find_sequences(
    batch: int,
    tokens: int,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    past: int,
) -> Sequences | None:
    """None where each row is one sequence without padding.

    Args:
        position_ids: as text_positions returns them. cu_seqlens: as given_offsets does.
        past: how many columns a cache holds already, one sequence in each row.
    """
    if past and tokens == 1:
        if cu_seqlens is not None:
            return Sequences(cu_seqlens)
        if attention_mask is None or not _may_wait(attention_mask):
            return None
        position_ids = seq_idx = None  # one token begins nothing
    real = None if attention_mask is None else _real_tokens(attention_mask, batch, tokens, past)
    if cu_seqlens is not None:
        return _without_padding(cu_seqlens, real)
    if real is None and position_ids is None and seq_idx is None:
        return None
    if any(x is not None and x.is_meta for x in (position_ids, seq_idx)):
        return None
    index, rows = _real_places(real, batch, tokens, (position_ids, seq_idx))
    breaks = None
    if seq_idx is not None:
        breaks = seq_idx.expand(batch, -1).flatten()[index].diff() != 0
    elif position_ids is not None:
        step = position_ids.expand(batch, -1).flatten()[index].diff()
        # positions may count the padding between two tokens, or not
        breaks = (step != 1) & (step != index.diff())
    if breaks is None:
        return Sequences(rows, index)
    breaks = breaks & (index // tokens).diff().eq(0)
    begin = breaks.nonzero()[:, 0].to(torch.int32) + 1
    if begin.shape[0] == 0:
        return None if real is None else Sequences(rows, index)
    if past:
        raise ValueError(
            "position_ids (or seq_idx): want consecutive tokens of one sequence in each row beside "
            f"a cache that holds earlier ones, got a new sequence inside a row of {tokens} tokens"
        )
    begin = torch.cat([rows, begin]).sort().values
    return Sequences(begin, None if real is None else index)


def _may_wait(x: Tensor) -> bool:
    """Whether the host may look at numbers of x here: not in a graph of a step."""
    captures = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return not captures and not torch.compiler.is_compiling()


def _real_tokens(attention_mask: Tensor, batch: int, tokens: int, past: int) -> Tensor | None:
    """Mask of the last `tokens` columns that are no padding, bool [B, T]; None if all are."""
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch:
        raise ValueError(
            f"attention_mask: want shape ({batch}, tokens), got {tuple(attention_mask.shape)}"
        )
    if attention_mask.shape[1] not in (tokens, past + tokens):
        beside = f", or {past + tokens} with those of the cache" if past else ""
        raise ValueError(
            f"attention_mask: want the {tokens} columns of input_ids{beside}, "
            f"got {attention_mask.shape[1]}"
        )
    if attention_mask.is_complex():
        raise TypeError(f"attention_mask: want bools or numbers, got {attention_mask.dtype}")
    if attention_mask.is_meta:
        return None  # it has no values, and shapes are those of rows without padding
    real = attention_mask[:, attention_mask.shape[1] - tokens :].ne(0)
    return None if bool(real.all()) else real


def _real_places(
    real: Tensor | None, batch: int, tokens: int, like: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor]:
    """Places of the real tokens in the flattened [B * T], and the rows' offsets among them."""
    if real is not None:
        return real.flatten().nonzero()[:, 0], offsets(real.sum(1, dtype=torch.int32))
    device = next(x.device for x in like if x is not None)
    rows = torch.arange(batch + 1, device=device, dtype=torch.int32) * tokens
    return torch.arange(batch * tokens, device=device), rows


def _without_padding(cu_seqlens: Tensor, real: Tensor | None) -> Sequences:
    if real is None:
        return Sequences(cu_seqlens)
    before = F.pad(real.flatten().cumsum(0, dtype=torch.int32), (1, 0))
    return Sequences(before[cu_seqlens.long()], real.flatten().nonzero()[:, 0])


def text_positions(position_ids: Tensor | None, batch: int, tokens: int) -> Tensor | None:
    """position_ids as [1 or B, T], of [T], of that or of [R, 1 or B, T] with R equal tables."""
    if position_ids is None:
        return None
    if position_ids.is_floating_point() or position_ids.is_complex():
        raise TypeError(f"position_ids: want integers, got {position_ids.dtype}")
    positions = position_ids
    if positions.dim() == 3 and positions.shape[0] > 0:
        first = positions[0]
        if not bool((positions == first).all()):
            raise ValueError(
                "position_ids: want the same positions in every table of a 3-dimensional tensor, "
                f"since this model has one position per token, got {tuple(positions.shape)} with "
                "tables that differ"
            )
        positions = first
    if positions.dim() == 1:
        positions = positions[None]
    if positions.dim() != 2 or positions.shape not in ((1, tokens), (batch, tokens)):
        raise ValueError(
            f"position_ids: want shape (1, {tokens}) or ({batch}, {tokens}), "
            f"got {tuple(position_ids.shape)}"
        )
    return positions


def given_offsets(
    batch: int,
    tokens: int,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor | None:
    """The offsets of a batch of one that are given, under one name or several.

    Raises:
        ValueError: two of them do not agree, or one is of another shape. TypeError: no integers.
    """
    given = {
        "cu_seqlens": cu_seqlens,
        "cu_seq_lens_q": cu_seq_lens_q,
        "cu_seq_lens_k": cu_seq_lens_k,
    }
    if seq_idx is not None and (seq_idx.is_floating_point() or seq_idx.is_complex()):
        raise TypeError(f"seq_idx: want integers, got {seq_idx.dtype}")
    if seq_idx is not None and seq_idx.shape not in ((batch, tokens), (1, tokens)):
        raise ValueError(
            f"seq_idx: want shape (1, {tokens}) or ({batch}, {tokens}), got {tuple(seq_idx.shape)}"
        )
    for name, x in given.items():
        if x is not None and (x.dim() != 1 or x.shape[0] < 1):
            raise ValueError(f"{name}: want offsets [N+1], got shape {tuple(x.shape)}")
        if x is not None and x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: want torch.int32 or torch.int64, got {x.dtype}")
    names = [name for name, x in given.items() if x is not None]
    if not names:
        return None
    first = given[names[0]]
    assert first is not None
    if batch != 1:
        raise ValueError(f"{names[0]}: want a batch of one beside offsets, got {batch} rows")
    if torch.compiler.is_compiling():
        return first
    if seq_idx is not None:
        given["seq_idx"] = _offsets_of(seq_idx[0])
    for name, x in given.items():
        if x is None or x is first or x.device.type != "cpu" or first.device.type != "cpu":
            continue
        # an empty sequence repeats an offset
        if x.unique().tolist() != first.unique().tolist():
            raise ValueError(
                f"{name}: want the sequences of {names[0]}, {first.tolist()}, got {x.tolist()}"
            )
    return first


def _offsets_of(seq_idx: Tensor) -> Tensor | None:
    """The offsets for the numbers [T] of a row's sequences; None on a GPU, where it would wait."""
    if seq_idx.device.type != "cpu":
        return None
    begin = seq_idx.diff().ne(0).nonzero()[:, 0] + 1
    return torch.cat([begin.new_zeros(1), begin, begin.new_full((1,), seq_idx.shape[0])])


def offsets(lengths: Tensor) -> Tensor:
    """Lengths [N] -> cu_seqlens [N+1]"""
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
