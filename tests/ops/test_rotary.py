"""Rotary positions: what they are for, and what they refuse."""

import pytest
import torch

from slipstream.nn import decoding
from slipstream.ops.rotary import packed_positions, rotary_embedding, rotary_tables
from slipstream.runtime.backends import HAVE_TRITON


def test_xpos_has_gradients() -> None:
    x = torch.randn(1, 5, 2, 6, dtype=torch.float64, requires_grad=True)
    tables = rotary_tables(torch.arange(5), 4, xpos=-3.0, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotary_embedding(x, *tables), x)


def test_rotary_tables_by_position_or_token() -> None:
    x, at = torch.randn(2, 5, 3, 8), torch.randint(0, 20, (2, 5))
    by_position = rotary_embedding(x, *rotary_tables(torch.arange(20), 8), positions=at)
    assert torch.equal(by_position, rotary_embedding(x, *rotary_tables(at, 8)))
    tables = rotary_tables(torch.arange(20), 8)
    one_row, row = (rotary_embedding(x, *tables, positions=p) for p in (at[:1], at[0]))
    assert torch.equal(one_row, row)


def test_packed_positions_begin_anew_in_each_sequence() -> None:
    offsets = torch.tensor([0, 3, 3, 5])
    assert packed_positions(offsets, 5).tolist() == [[0, 1, 2, 0, 1]]
    started = packed_positions(offsets, 5, offsets=torch.tensor([10, 20, 30]))
    assert started.tolist() == [[10, 11, 12, 30, 31]]


def test_rotary_rejects_faults_by_name() -> None:
    x = torch.randn(2, 5, 3, 8)
    cos, sin = rotary_tables(torch.arange(4), 8)
    for call, error, word in [
        (lambda: rotary_embedding(x, cos, sin), ValueError, "cos: want at least 5 rows"),
        (lambda: rotary_embedding(x[..., :6], cos, sin), ValueError, "cos: want at most 3"),
        (lambda: rotary_embedding(x, cos, sin[:3]), ValueError, "sin: want shape"),
        (
            lambda: rotary_embedding(x, cos, sin, positions=torch.zeros(5)),
            TypeError,
            "positions: want int32",
        ),
        (
            lambda: rotary_embedding(x, cos, sin, positions=torch.zeros(2, 4).long()),
            ValueError,
            "positions: want shape",
        ),
        (lambda: rotary_tables(torch.arange(4), 7), ValueError, "dim: want an even number"),
        (lambda: rotary_tables(torch.arange(4), 8, xpos=0), ValueError, "xpos: want tokens"),
        (lambda: rotary_tables(torch.arange(4), 8, dtype=torch.int32), TypeError, "dtype: want"),
    ]:
        with pytest.raises(error, match=word):
            call()


@pytest.mark.parametrize("wrong", [-1, 20, 1 << 40])
def test_rotary_refuses_positions_outside_of_the_table(wrong: int) -> None:
    cos, sin = rotary_tables(torch.arange(20), 8)
    x, positions = torch.randn(2, 5, 3, 8), torch.arange(5).repeat(2, 1)
    positions[1, 2] = wrong
    word = rf"positions: id {wrong} at position \(1, 2\) is outside the table of 20"
    with pytest.raises(ValueError, match=word):
        rotary_embedding(x, cos, sin, positions=positions)


@pytest.mark.parametrize("offsets", [[2, 5], [0, 4], [0, 6], [0, 4, 3, 5]])
def test_packed_positions_refuses_offsets_that_do_not_fit(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens: want offsets"):
        packed_positions(torch.tensor(offsets), 5)


def test_tables_of_a_step_are_each_calls_own() -> None:
    """Made once for the same positions, features, base and dtype."""
    first = torch.arange(4), 8, 1e4, torch.float32
    others = [(0, torch.arange(4) + 1), (1, 6), (2, 1e6), (3, torch.float64)]
    calls = [first, *((*first[:i], x, *first[i + 1 :]) for i, x in others)]
    with decoding.step():
        made = [decoding.tables(*call) for call in calls]
        assert decoding.tables(*first) is made[0]
    for (positions, dim, base, dtype), got in zip(calls, made, strict=True):
        want = rotary_tables(positions, dim, base=base, dtype=dtype)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("wider", [(0, 0, 0, 0), (0, 0, 0, 2), (0, 0, 1, 0), (0, 1, 0, 0)])
def test_copies_go_to_any_strides(wider: tuple[int, ...]) -> None:
    from slipstream.kernels.elementwise.triton.rotary import _copy

    y = torch.randn(2, 3, 4, 8).bfloat16()
    x = torch.zeros([n + more for n, more in zip(y.shape, wider)]).bfloat16()
    x = x[:, : y.shape[1], : y.shape[2], : y.shape[3]]
    _copy(x, y)
    assert torch.equal(x, y)
    _copy(x.mT, 2 * y.mT)  # columns of it
    assert torch.equal(x, 2 * y)
