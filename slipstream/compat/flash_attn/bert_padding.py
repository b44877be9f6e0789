"""flash_attn.bert_padding: rows with padding to tokens side by side, and back."""

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.runtime.token_ids import expect_below


@checks.operator
def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """input[indices], of an input of two dimensions or more."""
    return input.index_select(0, indices)


@checks.operator
def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros [first_axis_dim, ...] with values [N, ...] at indices [N]."""
    if values.dim() == 0 or indices.shape != values.shape[:1]:
        raise ValueError(
            f"indices: want one for each of the tokens {tuple(values.shape)}, "
            f"got shape {tuple(indices.shape)}"
        )
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices: want int32 or int64, got {indices.dtype}")
    expect_below("indices", indices, first_axis_dim, "places")
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_copy(0, indices, values)


@checks.operator
def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """input[indices] and the input."""
    return input.index_select(0, indices), input.view_as(input)


@checks.operator
def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of rows that a mask selects, side by side.

    Args:
        hidden_states: [B, T, ...]. attention_mask: [B, T], 1 for a token, 0 for padding.
        unused_mask: [B, T], 1 for what is selected too but not counted as used.

    Returns:
        The tokens [N, ...], their places [N] among all B T, offsets of the rows int32 [B + 1],
        the longest row's number of tokens, and how many of each row are used, int32 [B].
    """
    _check_rows(hidden_states, "attention_mask", attention_mask)
    if unused_mask is not None:
        checks.expect_shape("unused_mask", unused_mask, attention_mask.shape)
    selected = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = selected.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    hidden_states, indices, offsets, longest = _unpad(hidden_states, selected, lengths)
    return hidden_states, indices, offsets, longest, used


@checks.operator
def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """unpad_input of rows that hold several sequences each.

    Args:
        attention_mask_in_length: [B, T], the lengths of a row's sequences, then zeros.

    Returns:
        The tokens [N, ...], their places [N], offsets of the sequences, the longest one's length.
    """
    _check_rows(hidden_states, "attention_mask_in_length", attention_mask_in_length)
    lengths, T = attention_mask_in_length, attention_mask_in_length.shape[-1]
    token = torch.arange(T, device=lengths.device)
    selected = token < lengths.sum(-1, keepdim=True)
    return _unpad(hidden_states, selected, lengths[lengths != 0].int())


@checks.operator
def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Tokens [N, ...] at their places of [batch, seqlen, ...], 0 elsewhere."""
    for name, size in (("batch", batch), ("seqlen", seqlen)):
        checks.expect_not_negative(name, size)
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(
        0, (batch, seqlen)
    )


def _check_rows(hidden_states: Tensor, name: str, mask: Tensor) -> None:
    if hidden_states.dim() < 2:
        raise ValueError(f"hidden_states: want [B, T, ...], got shape {tuple(hidden_states.shape)}")
    checks.expect_shape(name, mask, hidden_states.shape[:2])


def _unpad(x: Tensor, selected: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = selected.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return x.flatten(0, 1).index_select(0, indices), indices, offsets, longest
