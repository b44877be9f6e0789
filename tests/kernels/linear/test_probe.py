"""The numeric probe: silent where kernels are right, and it names what is wrong."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.kernels.linear import probe
from slipstream.kernels.linear.eager.chunk import chunk_forward
from slipstream.kernels.linear.eager.chunk_backward import chunk_backward
from slipstream.kernels.linear.terms import Terms


def terms(dtype: torch.dtype, packed: bool) -> Terms:
    q, k = torch.randn(2, 1, 9, 2, 16, dtype=dtype)
    v = torch.randn(1, 9, 4, 24, dtype=dtype)
    g, beta = -torch.rand(2, 1, 9, 4)
    cu = torch.tensor([0, 4, 9]) if packed else None
    state = torch.randn(2 if packed else 1, 4, 16, 24)
    return Terms(q, k, v, g=g, beta=-beta, initial_state=state, cu_seqlens=cu)


def launches(wrong: str | None) -> Any:
    """Plain torch as a launch, with one gradient made wrong."""

    def backward(terms: Terms, dout: Any, dfinal: Any, scale: float) -> dict:
        grads = chunk_backward(terms, dout, dfinal, scale, 16)
        return grads if wrong is None else {**grads, wrong: grads[wrong] * 1.2}

    return SimpleNamespace(
        forward=lambda terms, scale: chunk_forward(terms, scale, 16), backward=backward
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_probe_accepts_rounding_and_nothing_else(dtype: torch.dtype, packed: bool) -> None:
    given = terms(dtype, packed)
    assert probe.mismatch(given, launches(None)) is None
    for wrong in ("k", "g", "beta", "initial_state"):
        assert f"gradient of {wrong} is off" in str(probe.mismatch(given, launches(wrong)))
    assert probe.like(given).q.dtype == dtype
    assert probe.variant(given) == probe.variant(terms(dtype, packed))
    assert probe.variant(given) != probe.variant(given._replace(g=None))
