"""The additive family's scans in Gluon on sm_90: the oracle's numbers, twice the same bits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.sm90 import plan
from tests.gpu.sm90_runs import (
    LENGTHS,
    MARKS,
    expect,
    gradients_of_results,
    offsets,
    reference,
    run,
)

pytestmark = MARKS

SIZES = {  # B, T, H, HV, lengths of packed sequences
    "whole": (1, 128, 1, 2, None),
    "odd": (2, 70, 1, 3, None),
    "packed": (1, 270, 2, 4, LENGTHS),
}
LIMITS = {"o": 0.005, "final": 0.005, "g": 0.02}


def inputs(size: tuple, gated: bool, K: int) -> LinearInputs:
    """K and V are equal."""
    B, T, H, HV, lengths = size
    N = B if lengths is None else len(lengths)
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.rand(B, T, HV, device="cuda")
    return LinearInputs(
        torch.randn(B, T, H, K, **make),
        F.normalize(torch.randn(B, T, H, K, **make), dim=-1),
        torch.randn(B, T, HV, K, **make),
        g=torch.where(x < 0.1, -torch.inf, -x) if gated else None,
        initial_state=torch.randn(N, HV, K, K, device="cuda"),
        cu_seqlens=offsets(lengths),
    )


@pytest.mark.parametrize("K", plan.SCALAR_DECAY_WIDTHS)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_additive_scans_match_reference(size: tuple, gated: bool, K: int) -> None:
    from slipstream.kernels.linear.sm90.scalar_decay import backend

    torch.manual_seed(0)
    terms = inputs(size, gated, K)
    assert plan.unsupported_reason(terms) is None
    do, dfinal = gradients_of_results(terms)
    want = reference(terms, do, dfinal)
    expect(lambda: run(backend, terms, do, dfinal), want, LIMITS, 0.008)
