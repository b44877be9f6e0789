"""fla.ops.utils.index: offsets, positions and chunks of packed sequences.

cu_seqlens [N+1] are offsets. cu_seqlens_cpu, where a function takes it, is the same on the host:
what has to be counted is counted there, without a synchronisation of the device.
"""

import itertools

import torch
from torch import Tensor

# where prepare_split_cu_seqlens puts its result
HOST = torch.device("cpu")


def prepare_lens(cu_seqlens: Tensor) -> Tensor:
    """Lengths [N]."""
    return cu_seqlens.diff()


def prepare_lens_from_mask(mask: Tensor) -> Tensor:
    """How many entries of each row of a mask [N, T] are set, int32 [N]."""
    return mask.bool().count_nonzero(1).int()


def prepare_cu_seqlens_from_lens(lens: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """Offsets [N+1] from lengths [N]."""
    offsets = lens.new_zeros(len(lens) + 1, dtype=torch.int64 if dtype is None else dtype)
    offsets[1:] = lens.cumsum(0)
    return offsets


def prepare_cu_seqlens_from_mask(mask: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """Offsets [N+1] of the set entries of a mask [N, T]."""
    lengths = prepare_lens_from_mask(mask)
    return prepare_cu_seqlens_from_lens(lengths, dtype)


def prepare_split_cu_seqlens(
    batch_size: int | None = None,
    seq_len: int | None = None,
    split_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype | None = torch.int32,
    device: torch.device | None = HOST,
) -> Tensor:
    """Offsets after each sequence is cut every split_size tokens.

    The sequences are those of cu_seqlens, or batch_size of seq_len tokens each.
    """
    if split_size is None:
        raise TypeError("split_size: want a number of tokens, got None")
    if cu_seqlens is not None:
        offsets = cu_seqlens.tolist()
    elif batch_size is None or seq_len is None:
        raise TypeError("cu_seqlens: want offsets, or batch_size and seq_len")
    else:
        offsets = [n * seq_len for n in range(batch_size + 1)]
    cuts = [i for a, b in itertools.pairwise(offsets) for i in range(a, b, split_size)]
    return torch.tensor([*cuts, offsets[-1]], dtype=dtype, device=device)


def prepare_position_ids(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """The position of each token in its sequence [T]."""
    return _numbered(prepare_lens(_host(cu_seqlens, cu_seqlens_cpu)))[1].to(cu_seqlens)


def prepare_sequence_ids(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """Which sequence each token belongs to [T], empty ones not counted."""
    lengths = prepare_lens(_host(cu_seqlens, cu_seqlens_cpu))
    owner, _ = _numbered(lengths[lengths > 0])
    return owner.to(cu_seqlens.device, torch.int64)


def prepare_token_indices(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """prepare_sequence_ids and prepare_position_ids, [T, 2]."""
    positions = prepare_position_ids(cu_seqlens, cu_seqlens_cpu)
    sequences = prepare_sequence_ids(cu_seqlens, cu_seqlens_cpu)
    return torch.stack([sequences, positions], 1).to(cu_seqlens)


def prepare_chunk_indices(
    cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None
) -> Tensor:
    """Sequence and number in it of each chunk of chunk_size tokens, [chunks, 2]."""
    chunks = _chunks(_host(cu_seqlens, cu_seqlens_cpu), chunk_size)
    return torch.stack(_numbered(chunks), 1).to(cu_seqlens)


def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """Offsets [N+1] of the sequences, counted in chunks."""
    return torch.nn.functional.pad(_chunks(cu_seqlens, chunk_size), (1, 0)).cumsum(-1)


def get_max_num_splits(
    cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None
) -> int:
    """How many chunks the longest sequence has."""
    return int(_chunks(_host(cu_seqlens, cu_seqlens_cpu), chunk_size).max())


def prepare_chunk_indices_static(
    cu_seqlens: Tensor, chunk_size: int, nt_max: int
) -> tuple[Tensor, Tensor]:
    """prepare_chunk_indices and prepare_chunk_offsets of shapes that a graph can be captured with.

    Returns:
        indices [nt_max, 2], (-1, 0) past the last chunk, and offsets [N+1].
    """
    offsets = prepare_chunk_offsets(cu_seqlens, chunk_size)
    chunk = torch.arange(nt_max, device=cu_seqlens.device, dtype=offsets.dtype)
    sequence = torch.searchsorted(offsets, chunk, right=True) - 1
    live = chunk < offsets[-1]
    number = torch.where(live, chunk - offsets[sequence], 0)
    indices = torch.stack([torch.where(live, sequence, -1), number], 1)
    return indices.to(cu_seqlens), offsets.to(cu_seqlens)


def _host(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None) -> Tensor:
    return cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu


def _chunks(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    return (cu_seqlens.diff() + chunk_size - 1).div(chunk_size, rounding_mode="floor")


def _numbered(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Things of which the i-th owner has counts[i]: the owner of each, and its number there."""
    ends = counts.cumsum(0)
    place = torch.arange(int(counts.sum()), device=counts.device)
    owner = torch.searchsorted(ends, place, right=True)
    return owner, place - (ends - counts)[owner]
