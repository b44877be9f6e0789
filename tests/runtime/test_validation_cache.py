"""A call that is like one that has passed, and one that only seems so."""

from collections.abc import Callable

import pytest
import torch

from slipstream import ops
from slipstream.runtime.dispatch import signature


def test_equal_numbers_of_other_types_are_other_calls() -> None:
    x = torch.randn(2, 3)
    assert signature((x, None), 64, "eager") == signature((torch.zeros(2, 3), None), 64, "eager")
    keys = {signature((x, None), each, "eager") for each in (64, 64.0, 1, 1.0, True)}
    assert len(keys) == 5


@pytest.mark.parametrize("fn", [ops.chunk_retention, ops.chunk_linear_attn])
def test_chunk_size_of_another_type_is_refused(fn: Callable) -> None:
    q, k, v = torch.randn(3, 1, 70, 2, 16)
    fn(q, k, v, chunk_size=64)
    with pytest.raises(TypeError, match="chunk_size: want an integer or None, got float"):
        fn(q, k, v, chunk_size=64.0)
