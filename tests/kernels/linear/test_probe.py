"""The numeric probe: silent where kernels are right, and it names what is wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream.kernels.linear import op, probe
from slipstream.kernels.linear.inputs import ForwardCall, LinearInputs
from slipstream.kernels.linear.triton.plan import kind
from slipstream.tools.samples import FILL, Making


def terms(dtype: torch.dtype, packed: bool) -> LinearInputs:
    q, k = torch.randn(2, 1, 9, 2, 16, dtype=dtype)
    v = torch.randn(1, 9, 4, 24, dtype=dtype)
    g, beta = -torch.rand(2, 1, 9, 4)
    cu = torch.tensor([0, 4, 9]) if packed else None
    state = torch.randn(2 if packed else 1, 4, 16, 24)
    return LinearInputs(q, k, v, g=g, beta=-beta, initial_state=state, cu_seqlens=cu)


def planted(wrong: str | None) -> Callable:
    """The operator, with one gradient of its Triton path made wrong."""

    def linear(terms: LinearInputs, how: ForwardCall) -> Any:
        o, final = op.linear(terms, how._replace(impl="eager"))
        if wrong is not None and how.impl != "eager":
            getattr(terms, wrong).register_hook(lambda grad: grad * 1.2)
        return o, final

    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_probe_accepts_rounding_and_nothing_else(dtype: torch.dtype, packed: bool) -> None:
    given = terms(dtype, packed)
    for by_token in (False, True):
        assert probe.mismatch(given, "triton", by_token, planted(None)) is None
    for wrong in ("k", "g", "beta", "initial_state"):
        found = probe.mismatch(given, "triton", False, planted(wrong))
        assert f"gradient of {wrong} is off" in str(found)
    assert probe.like(given).q.dtype == dtype
    assert kind(given) == kind(terms(dtype, packed)) == kind(probe.like(given))
    assert kind(given) != kind(given._replace(g=None))


def test_states_of_samples_are_small_beside_products() -> None:
    """So that an error of either shows."""
    making, cpu = Making(*[None] * 3, torch.device("cpu")), torch.device("cpu")  # pyright: ignore
    for x in (probe._VALUES["state"]([9999], cpu), FILL["state"](making, [9999])):
        assert abs(x.mean()) < 0.01 and 0.09 < x.std() < 0.11
    one = FILL["one"](making, [9999])
    assert 0.99 < one.mean() < 1.01 and 0.09 < one.std() < 0.11
