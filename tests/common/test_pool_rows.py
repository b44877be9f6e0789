"""Rows of a pool by index in plain torch."""

from typing import Any

import pytest
import torch

from slipstream import ops
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


@pytest.mark.parametrize(("sequences", "slots"), [(0, 3), (2, 0), (0, 0)])
def test_steps_of_no_sequences_or_slots(sequences: int, slots: int) -> None:
    """y is 0, and the pool stays as it is, of every operator of a decoding step on a pool."""
    N, H, K = sequences, 2, 4
    at = torch.full((N,), -1)
    x, heads, last = torch.randn(N, H * K), torch.randn(N, 1, H, K), torch.randn(slots, H * K)
    given: dict[str, Any] = {"state": torch.randn(slots, H, K, K), "state_indices": at}
    pools = [last, given["state"]]
    before = [pool.clone() for pool in pools]
    D, r_k = torch.randn(H * K), torch.randn(H, K)
    given_norm: dict[str, Any] = {"norm_weight": D, "norm_bias": D}
    found = [
        ops.token_mix_step(x, torch.randn(6, H * K), state=last, state_indices=at),
        ops.rwkv7_step(x, x, x, x, x, x, **given, k_k=D, k_a=D, r_k=r_k, **given_norm),
        ops.mixer_step(heads, heads, heads, **given),
        ops.recurrent_step(heads, heads, heads, **given),
    ]
    for y in found:
        assert y.shape[-1] > 0 and not y.any()
    assert all(map(torch.equal, pools, before))
