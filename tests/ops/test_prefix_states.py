"""prefix_states: what operators leave in a pool on their way, in plain torch. Kernels have
tests/kernels/linear/test_bits_interpreted.py, those of sm_90 their emulated tests, and a
GPU tests/gpu/test_prefix_states.py."""

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.kernels.linear import prefix_states
from slipstream.kernels.linear.modes import prefix_states as modes
from slipstream.ops import PrefixStates
from tests.support.prefix_states import OPERATORS, Call, expect_prefix_states, one_by_one


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("lengths", [None, (70, 5, 0, 256, 64)], ids=["batch", "packed"])
@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_states_are_those_of_prefixes(operator: str, lengths: Any, impl: str) -> None:
    call = Call.make(operator, lengths, impl=impl)
    with mock.patch.object(modes, "_call_with_prefix_states") as kernels:
        expect_prefix_states(call, rtol=1e-4)
    kernels.assert_not_called()


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("lengths", [None, (70, 5, 0, 256, 64)], ids=["batch", "packed"])
def test_consistent_states_equal_calls_one_by_one(operator: str, lengths: Any) -> None:
    call = Call.make(operator, lengths, consistent=True)
    o, pool, final = call.run()
    want, prefixes, ends = one_by_one(call)
    assert torch.equal(o, want) and torch.equal(final, ends)
    for row, state in prefixes.items():
        assert torch.equal(pool[row], state), row


def test_wide_heads_are_left_by_calls() -> None:
    call = Call.make("chunk_simple_gla", (130, 64), K=16, V=272)
    expect_prefix_states(call, rtol=1e-4)


def test_other_rows_are_not_written() -> None:
    call = Call.make("chunk_gated_delta_rule", None)
    rows = torch.tensor([[-1, 99, -7, -1], [2**31 - 1, -1, 1, -1]], dtype=torch.int32)
    call.prefix = PrefixStates(torch.full_like(call.prefix.pool, torch.nan), rows)
    _, pool, _ = call.run()
    assert pool[1].isfinite().all()
    pool[1] = torch.nan
    assert pool.isnan().all()


def test_every_lists_rows_of_packed_sequences() -> None:
    cu = torch.tensor([0, 130, 130, 600], dtype=torch.int32)
    pool = torch.empty(5, 1, 1, 1)
    rows = prefix_states.every(pool, cu, 640, 128).rows
    assert rows.dtype == torch.int32 and rows.shape == (3, 10)
    found = {(n, j): int(to) for n, x in enumerate(rows) for j, to in enumerate(x) if to >= 0}
    assert found == {(0, 1): 0, (2, 1): 1, (2, 3): 2, (2, 5): 3}
    for n, (begin, end) in enumerate(pairwise(cu.tolist())):
        assert sum(m == n for m, _ in found) == (end - begin) // 128
    with pytest.raises(ValueError, match="multiple of 64"):
        prefix_states.every(pool, cu, 640, 100)


def _refused(change: Any, error: type[Exception], words: str, **options: Any) -> None:
    for consistent in (False, True):
        call = Call.make("chunk_gated_delta_rule", (64, 70))
        call.prefix = change(*call.prefix)
        call.options |= options | {"consistent": consistent}
        with pytest.raises(error, match=words):
            call.run()


def test_wrong_pools_are_refused() -> None:
    _refused(lambda pool, rows: PrefixStates(pool[:, 0], rows), ValueError, "prefix_states.pool")
    _refused(
        lambda pool, rows: PrefixStates(pool[..., :-1], rows), ValueError, "prefix_states.pool"
    )
    _refused(lambda pool, rows: PrefixStates(pool.mT, rows), ValueError, "prefix_states.pool")
    _refused(lambda pool, rows: PrefixStates(pool.int(), rows), TypeError, "prefix_states.pool")
    _refused(lambda pool, rows: PrefixStates(pool, rows[:, :-1]), ValueError, "prefix_states.rows")
    _refused(lambda pool, rows: PrefixStates(pool, rows.long()), TypeError, "prefix_states.rows")
    _refused(lambda *prefix: prefix, TypeError, "prefix_states")
    _refused(PrefixStates, NotImplementedError, "reverse", reverse=True)


@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_gradients_are_refused(name: str, consistent: bool) -> None:
    given = Call.make("chunk_gated_delta_rule", None, consistent=consistent).arguments()
    given[name].requires_grad_()
    with pytest.raises(NotImplementedError, match="no_grad"):
        ops.chunk_gated_delta_rule(**given)


@pytest.mark.parametrize("options", [{"impl": "eager"}, {"consistent": True}])
def test_initial_states_may_be_rows_of_the_pool(options: dict[str, Any]) -> None:
    """The second sequence begins with what was in a row that the first one writes."""
    call = Call.make("chunk_gated_delta_rule", (64, 70), state_v_first=True, **options)
    pool = torch.randn(2, *call.prefix.pool.shape[1:])
    rows = torch.tensor([[1, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    outputs = []
    for own in (False, True):
        call.prefix = PrefixStates(pool.clone(), rows)
        call.state = call.prefix.pool if own else pool
        outputs.append(call.run()[0])
    assert torch.equal(*outputs)


def test_pool_of_16_bits() -> None:
    call = Call.make("chunk_kda", (70, 130))
    call.prefix = call.prefix._replace(pool=call.prefix.pool.bfloat16())
    _, pool, _ = call.run()
    _, prefixes, _ = one_by_one(call)
    for row, state in prefixes.items():
        want: Tensor = state.bfloat16()
        torch.testing.assert_close(pool[row], want)
