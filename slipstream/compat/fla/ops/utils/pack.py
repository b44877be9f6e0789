"""fla.ops.utils.pack: padded batches to packed sequences and back."""

import torch
from torch import Tensor

from slipstream.compat.fla.ops.utils.index import prepare_lens, prepare_position_ids


def pack_sequence(x: Tensor, cu_seqlens: Tensor, padding_side: str = "left") -> Tensor:
    """The tokens [T, ...] of a padded batch [N, L, ...], in the order of the rows."""
    return x[_rows_and_columns(cu_seqlens, x.shape[1], padding_side)]


def unpack_sequence(
    x: Tensor,
    cu_seqlens: Tensor,
    padding_side: str = "left",
    desired_shape: torch.Size | None = None,
) -> Tensor:
    """A batch [N, L, ...] padded with 0, of tokens [T, ...]; L is the longest length, or that of
    desired_shape."""
    if desired_shape is None:
        longest = int(prepare_lens(cu_seqlens).max())
        desired_shape = torch.Size((len(cu_seqlens) - 1, longest, *x.shape[1:]))
    y = x.new_zeros(desired_shape)
    return y.index_put(_rows_and_columns(cu_seqlens, desired_shape[1], padding_side), x)


def _rows_and_columns(cu_seqlens: Tensor, columns: int, side: str) -> tuple[Tensor, Tensor]:
    if side not in ("left", "right"):
        raise ValueError(f'padding_side: want "left" or "right", got {side!r}')
    lengths = prepare_lens(cu_seqlens)
    rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    place = prepare_position_ids(cu_seqlens).long()
    return rows, place + (columns - lengths[rows] if side == "left" else 0)
