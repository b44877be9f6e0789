"""Packed sequences: where each chunk's tokens lie, computed on the device without a host sync.

cu_seqlens [N+1] packs N sequences along T of a batch of one; sequence n holds the tokens
cu_seqlens[n] .. cu_seqlens[n+1]-1 and may be empty. Chunks of C tokens never cross a boundary.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ChunkMap(NamedTuple):
    """M chunk slots of C tokens; M is exact on the host and T // C + N, an upper bound, elsewhere.

    token [M, C]: index of the slot's token, 0 where there is none.
    live [M, C]: whether there is one.
    slot [T]: where token t lies in the flattened [M * C].
    sequence [M]: whose chunk it is; N for slots past the last chunk.
    first, last [M]: whether the chunk begins or ends its sequence.
    """

    token: Tensor
    live: Tensor
    slot: Tensor
    sequence: Tensor
    first: Tensor
    last: Tensor


def check_cu_seqlens_values(cu_seqlens: Tensor, tokens: int, name: str = "cu_seqlens") -> None:
    """On the host: from 0 to T, never falling. On a device it would be a sync, and is skipped."""
    if not cu_seqlens.is_cpu:
        return
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != tokens:
        raise ValueError(
            f"{name}: want offsets from 0 to the {tokens} tokens given, "
            f"got {offsets[0]} to {offsets[-1]}"
        )
    for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if end < begin:
            raise ValueError(f"{name}: want offsets that never fall, got {begin}, {end} at {n}")


def by_sequence(
    run: Callable[..., tuple[Tensor, Tensor]],
    tokens: Sequence[Tensor | None],
    states: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """run(*tokens, state), of packed sequences for one after the other: outputs [B, T, ...] and the
    states [N, ...] after them. For oracles, which look at the offsets."""
    if cu_seqlens is None:
        return run(*tokens, states)
    first = tokens[0]
    assert first is not None
    check_cu_seqlens_values(cu_seqlens, first.shape[1])
    places = [slice(*ends) for ends in itertools.pairwise(cu_seqlens.tolist())]
    pieces = [[None if x is None else x[:, at] for x in tokens] for at in places or [slice(0)]]
    rows = [None if states is None else states[n : n + 1] for n in range(len(places))] or [None]
    found = [run(*piece, state) for piece, state in zip(pieces, rows)]
    y, after = torch.cat([y for y, _ in found], 1), torch.cat([state for _, state in found])
    return (y, after) if places else (y.new_zeros(1, first.shape[1], *y.shape[2:]), after[:0])


def bounded_offsets(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Offsets as int64, by which no index lies outside of the tokens. On a device wrong ones are
    known only later, and an index outside would end the process: there these fit the tokens."""
    if cu_seqlens.is_cpu:
        return cu_seqlens.long()  # which check_cu_seqlens_values has seen
    found = cu_seqlens.long().clamp(0, tokens).cummax(0).values
    found[:1], found[1:][-1:] = 0, tokens
    return found


def chunk_map(cu_seqlens: Tensor, tokens: int, chunk: int) -> ChunkMap:
    device, sequences = cu_seqlens.device, cu_seqlens.shape[0] - 1
    begin = bounded_offsets(cu_seqlens, tokens)
    count = (begin.diff() + chunk - 1).div(chunk, rounding_mode="floor")  # [N] chunks of each
    end_chunk = count.cumsum(0)
    start_chunk = end_chunk - count
    if device.type == "cpu":
        slots = int(end_chunk[-1]) if sequences else 0
    else:
        slots = tokens // chunk + sequences
    m = torch.arange(slots, device=device)
    sequence = torch.searchsorted(end_chunk, m, right=True)  # [M], N past the end
    of = sequence.clamp(max=max(sequences - 1, 0))
    within = m - start_chunk[of]
    token = begin[of, None] + within[:, None] * chunk + torch.arange(chunk, device=device)
    live = token < begin[of + 1, None]  # none past the end, where `within` is beyond the last
    owner = torch.searchsorted(begin[1:], torch.arange(tokens, device=device), right=True)
    owner = owner.clamp(max=max(sequences - 1, 0))  # int64 [T]
    slot = start_chunk[owner] * chunk + torch.arange(tokens, device=device) - begin[owner]
    return ChunkMap(
        token=torch.where(live, token, 0),
        live=live,
        slot=slot,
        sequence=sequence,
        first=within == 0,
        last=within == count[of] - 1,
    )
