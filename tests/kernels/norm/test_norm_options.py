"""NormOptions: what of them a kernel with a row's norm beside something else is told."""

from typing import Any

import pytest

from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.nn import RMSNorm

PLAIN = NormOptions(1e-5)
OTHER: dict[str, Any] = {x: not getattr(PLAIN, x) for x in PLAIN._fields} | {
    "eps": 1e-3,
    "groups": 2,
    "activation": "sigmoid",
}


@pytest.mark.parametrize("name", PLAIN._fields)
def test_row_norms_are_those_whose_options_are_told(name: str) -> None:
    """An option that such kernels do not get, also one yet to come, is no row norm's."""
    other = PLAIN._replace(**{name: OTHER[name]})
    told = name == "eps" or other.row_constants() != PLAIN.row_constants()
    assert other.is_row_norm == told


def test_modules_with_other_options_have_no_row_norm() -> None:
    norm = RMSNorm(4, 1e-5, zero_centered=True)
    assert norm.row_norm == NormOptions(1e-5, zero_centered=True)
    norm.options["centre"] = True
    assert norm.row_norm is None and RMSNorm(4).row_norm is None
