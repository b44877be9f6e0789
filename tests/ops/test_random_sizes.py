"""Valid calls at random sizes, against the reference in float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.tools.catalog import flat
from tests.support import operators
from tests.support.formulas import wanted
from tests.support.operators import BLOCKS, LINEAR, Size, assert_near, block_size, budget, cast


def _operator(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(LINEAR))
    small, width = st.integers(1, 3), st.integers(1, 40)
    H = data.draw(small)
    size = Size(
        B=data.draw(small), T=data.draw(st.integers(1, 90)), H=H, HV=H * data.draw(small),
        K=data.draw(width), V=data.draw(width),
    )  # fmt: skip
    if data.draw(st.booleans()):
        lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
        size = operators.packed(size, *lengths, 1)
    gate = data.draw(st.sampled_from(["zero", "weak", "mixed", "strong"]))
    args = op.inputs(replace(size, gate=gate))
    want = flat(op(cast(args, torch.float64), impl="reference"))
    assert_near(op, flat(op(args)), want, budget(torch.float32), f"at {size}")


def _block(data: st.DataObject) -> None:
    block = data.draw(st.sampled_from(BLOCKS))
    # heads, groups and pairs of features divide the width
    args = block.inputs(block_size(data.draw(st.integers(1, 70)), 6 * data.draw(st.integers(1, 6))))
    want = wanted(block, cast(args, torch.float64))
    for got, y in zip(block.call(args), want, strict=True):
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
def test_reference_at_random_sizes_often(data: st.DataObject) -> None:
    _operator(data)
    _block(data)
