"""Rows of a pool by index in plain torch."""

import pytest
import torch

from slipstream.common.pool_rows import PoolRows


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("indices", [(3, -1, 0), (-1, 0, 5), (-1, -1, -1), (7, 5, -2), (5, 5, 5)])
def test_pool_rows_are_those_with_a_slot(indices: tuple[int, ...], dtype: torch.dtype) -> None:
    """An index past the pool is none, also where no sequence has a row."""
    pool, new = torch.randn(5, 2), torch.randn(3, 2)
    rows, want = PoolRows(torch.tensor(indices, dtype=dtype), 5), pool.clone()
    live = [n for n, slot in enumerate(indices) if 0 <= slot < 5]
    read = rows.read(pool)
    rows.write(pool, new)
    for n in live:
        assert torch.equal(read[n], want[indices[n]])
        want[indices[n]] = new[n]
    assert torch.equal(pool, want)
    zeroed = rows.or_zero(new)
    assert torch.equal(zeroed[live], new[live])
    assert not zeroed[[n for n in range(3) if n not in live]].any()
