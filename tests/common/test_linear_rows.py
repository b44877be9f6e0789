"""Gradients of a classifier, some rows at a time."""

import pytest
import torch

from slipstream.common.linear_rows import LinearRows


@pytest.mark.parametrize("sum_dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_rows_add_up(sum_dtype: torch.dtype) -> None:
    hidden, weight, d = (torch.randint(-2, 3, x).bfloat16() for x in ((6, 4), (5, 4), (6, 5)))
    layer = LinearRows(hidden, weight, None, True, sum_dtype)
    for rows in (slice(0, 2), slice(2, 6)):
        layer.add(rows, d[rows].float())
    assert layer.dweight.dtype == sum_dtype
    assert torch.equal(layer.dweight, (d.T @ hidden).to(sum_dtype))
    assert torch.equal(layer.dhidden, d @ weight)
