"""The chunk map: every token once, in order, and no chunk across a boundary."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.common.varlen import check_cu_seqlens_values, chunk_map


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.sampled_from([1, 4, 16]))
@settings(deadline=None, max_examples=60)
def test_chunk_map_covers_each_sequence_in_chunks(lengths: list[int], chunk: int) -> None:
    cu = torch.tensor([0, *lengths]).cumsum(0)
    tokens = int(cu[-1])
    m = chunk_map(cu, tokens, chunk)
    assert m.token[m.live].tolist() == list(range(tokens))
    assert m.token.shape[0] == sum(-(-n // chunk) for n in lengths)
    slots = torch.zeros(m.token.numel(), dtype=torch.long)
    slots[m.slot] = torch.arange(tokens)
    assert torch.equal(slots[m.live.flatten()], torch.arange(tokens))
    for row in range(m.token.shape[0]):
        n = int(m.sequence[row])
        inside = m.token[row][m.live[row]]
        assert cu[n] <= inside.min() <= inside.max() < cu[n + 1]
        assert bool(m.first[row]) == (int(inside.min()) == int(cu[n]))
        assert bool(m.last[row]) == (int(inside.max()) == int(cu[n + 1]) - 1)


def test_chunk_map_without_sync() -> None:
    """On a device the number of chunks is an upper bound known without reading the offsets."""
    cu = torch.tensor([0, 5, 5, 12], device="meta")
    m = chunk_map(cu, 12, 4)
    assert m.token.shape == (12 // 4 + 3, 4)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [([1, 5], "want offsets from 0"), ([0, 4], "got 0 to 4"), ([0, 6, 3, 5], "never fall")],
)
def test_check_cu_seqlens_values_rejects(offsets: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_cu_seqlens_values(torch.tensor(offsets), 5)
