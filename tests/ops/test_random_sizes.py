"""Valid calls at random sizes, against the reference in float64."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.runtime import dispatch
from slipstream.tools.catalog import Sample, flat
from slipstream.tools.samples import Making
from tests.support import operators
from tests.support.formulas import wanted
from tests.support.operators import (
    BLOCKS,
    LINEAR,
    TESTED,
    Size,
    assert_near,
    block_size,
    budget,
    cast,
)


def _operator(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(LINEAR))
    small, width = st.integers(1, 3), st.integers(1, 40)
    H = data.draw(small)
    size = Size(
        B=data.draw(small),
        T=data.draw(st.integers(1, 90)),
        H=H,
        HV=H * data.draw(small),
        K=data.draw(width),
        V=data.draw(width),
    )
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


def omissible(row: Sample) -> list[str]:
    """Names of options that differ from the function's defaults."""
    needs = {name for name, x in row.takes.items() if x.default is x.empty}
    return [
        name
        for name, value in row.options.items()
        if name not in needs and row.takes[name].default != value
    ]


CASES = [(row, name) for row in TESTED for name in omissible(row)]
# How a call without the option is refused.
REFUSED = {("glu_linear-squared_relu", "activation"): "^up: want a tensor"}


@pytest.mark.parametrize(("row", "option"), CASES, ids=lambda x: getattr(x, "name", x))
def test_option_changes_results(row: Sample, option: str) -> None:
    args = row.inputs(Size(T=20, D=24, C=24, state=False))
    left: dict[str, Any] = {name: x for name, x in row.options.items() if name != option}
    other = replace(row, options=left)
    if (text := REFUSED.get((row.name, option))) is not None:
        with pytest.raises(ValueError, match=text):
            other(args)
        return
    given, default = flat(row(args)), flat(other(args))
    alike = [x.shape == y.shape and torch.equal(x, y) for x, y in zip(given, default)]
    assert len(given) != len(default) or not all(alike)


def test_options_of_all_kinds_are_left_out() -> None:
    assert len(CASES) > 30


def test_gates_are_as_strong_as_their_name_says() -> None:
    drawn = {}
    for kind in ("zero", "weak", "mixed", "strong"):
        making = Making(Size(gate=kind), {}, {}, torch.device("cpu"))
        drawn[kind] = -making.gate([4000])
    upper = [float(x.quantile(0.75)) for x in drawn.values()]
    assert [float(x.max()) <= y for x, y in zip(drawn.values(), (0, 0.1, 50, 50))] == [True] * 4
    assert upper[:1] == [0] and 0.05 < upper[1] < 0.1 and 0.05 < upper[2] < 0.1 and upper[3] > 30
    assert drawn["mixed"].max() > 30


HEADS = 2
SIZE = Size(B=1, T=5, H=1, HV=HEADS, K=4, V=4, M=3)
NORMS = ("use_qk_l2norm_in_kernel", "use_q_l2norm", "use_k_l2norm")


@pytest.mark.parametrize("op", LINEAR, ids=lambda op: op.name)
def test_call_asked_for_plain_torch_leaves_no_choice(op: Sample) -> None:
    args = dict(op.inputs(SIZE))
    args |= {x: True for x in NORMS if x in op.takes}
    if "use_gate_in_kernel" in op.takes:
        args |= {"use_gate_in_kernel": True, "A_log": torch.zeros(HEADS)}
    chosen = []

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is dispatch.choose.__code__:
            chosen.append((frame.f_locals["family"], frame.f_locals["impl"]))

    sys.setprofile(look)
    try:
        op(args, impl="eager")
    finally:
        sys.setprofile(None)
    free = [family for family, impl in chosen if impl is None]
    assert not free, f"{op.name} leaves a choice to {free}"
