"""Valid calls at random sizes, against the reference in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.blocks import BLOCKS, cast
from tests.support.operators import OPERATORS, Size, assert_near, budget, flat, packed, widen


def _operator(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(OPERATORS))
    small, wide = st.integers(1, 3), st.integers(1, 40)
    H = data.draw(small)
    size = Size(B=data.draw(small), H=H, HV=H * data.draw(small), K=data.draw(wide))
    size = Size(size.B, data.draw(st.integers(1, 90)), H, size.HV, size.K, data.draw(wide))
    if data.draw(st.booleans()):
        lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
        size = packed(size, *lengths, 1)
    args = op.inputs(size, gate=data.draw(st.sampled_from(["zero", "weak", "mixed", "strong"])))
    want = flat(op(widen(args), impl="reference"))
    assert_near(op, flat(op(args)), want, budget(torch.float32), f"at {size}")


def _block(data: st.DataObject) -> None:
    block = data.draw(st.sampled_from(BLOCKS))
    # heads, groups and pairs of features divide the width
    args = block.inputs(data.draw(st.integers(1, 70)), 6 * data.draw(st.integers(1, 6)))
    before = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in args.items()}
    want = block.want(cast(before, torch.float64))
    for got, y in zip(block(args), want, strict=True):
        torch.testing.assert_close(got.double(), y.double(), rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_operator_matches_reference_at_any_size(data: st.DataObject) -> None:
    _operator(data)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_block_matches_reference_at_any_size(data: st.DataObject) -> None:
    _block(data)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_operator_and_block_match_reference_at_any_size_often(data: st.DataObject) -> None:
    _operator(data)
    _block(data)
