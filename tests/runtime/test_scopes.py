"""Scopes of a thread that calls of a model open, one within another."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from slipstream.nn import decoding
from slipstream.runtime import consistent as prefix_scope
from slipstream.runtime.consistent import BlockStep, consistent, consistent_scope


def state() -> tuple[Any, ...]:
    step = decoding._STEP
    scopes = prefix_scope.prefix_scope.prefixes, consistent_scope.on, consistent_scope.step
    return (*scopes, step.tables, step.drafts)


def leaving() -> AbstractContextManager[None]:
    rows = torch.zeros(1, 1, dtype=torch.int32)
    return prefix_scope.leaving(prefix_scope.Prefixes(64, 1, rows))


def block_step() -> AbstractContextManager[None]:
    return BlockStep(torch.zeros(1, dtype=torch.int64), lambda *x: None).running()


def step() -> AbstractContextManager[None]:
    return decoding.step(decoding.Drafts(4))


@pytest.mark.parametrize("scope", [leaving, block_step, step, decoding.shared_tables, consistent])
def test_scope_ends_with_what_was_before(scope: Callable[[], AbstractContextManager[None]]) -> None:
    outside = state()
    with scope():
        first = state()
        assert first != outside
        with pytest.raises(KeyError), scope():
            raise KeyError
        assert all(x is y for x, y in zip(state(), first, strict=True))
    assert state() == outside
