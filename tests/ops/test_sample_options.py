"""Options of the catalog's rows change results: else the tests of such a row say nothing of them.

Formulas and implementations agree on a bound that no value reaches, and on a factor that none of
them reads.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.tools.catalog import Sample, flat
from slipstream.tools.samples import Making
from tests.support.operators import TESTED, Size


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
