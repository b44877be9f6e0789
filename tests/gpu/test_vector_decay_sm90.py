"""Per-channel decay by the Gluon kernels on sm_90: the reference's numbers, the same bits twice."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.sm90 import plan
from tests.gpu.sm90_runs import (
    LENGTHS,
    MARKS,
    SCALE,
    expect,
    gradients_of_results,
    offsets,
    reference,
    run,
)

pytestmark = MARKS

SIZES = {  # B, T, H, HV, lengths of packed sequences, u; K and V are 128
    "odd": (2, 230, 1, 2, None, False),
    "packed": (1, 270, 2, 4, LENGTHS, False),
    "before": (1, 150, 1, 2, None, True),
    "packed before": (1, 270, 2, 4, LENGTHS, True),
}
LIMITS = {"o": 0.005, "final": 0.005, "g": 0.02}


def inputs(size: tuple, kind: str) -> LinearInputs:
    """With strong gates some chunks need levels."""
    B, T, H, HV, lengths, before = size
    N = B if lengths is None else len(lengths)
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.rand(B, T, HV, 128, device="cuda")
    g = -0.1 * x
    if kind == "strong":
        g = torch.where(x < 0.01, -torch.inf, torch.where(x < 0.2, -50 * x, g))
    return LinearInputs(
        torch.randn(B, T, H, 128, **make),
        F.normalize(torch.randn(B, T, H, 128, **make), dim=-1),
        torch.randn(B, T, HV, 128, **make),
        g=g.bfloat16(),
        u=torch.randn(HV, 128, device="cuda") if before else None,
        initial_state=torch.randn(N, HV, 128, 128, device="cuda"),
        cu_seqlens=offsets(lengths),
    )


@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize("kind", ["weak", "strong"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_segments_match_reference(
    size: tuple, kind: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.kernels.linear.segments import split_into_segments
    from slipstream.kernels.linear.sm90.vector_decay import backend

    torch.manual_seed(0)
    terms = inputs(size, kind)
    want = reference(terms, *gradients_of_results(terms))
    monkeypatch.setattr(backend, "vector_decay_sm90", lambda x: split_into_segments(x, tokens))

    def forward() -> dict[str, Tensor]:
        return dict(zip(("o", "final"), backend.forward(terms, SCALE), strict=True))

    expect(forward, want, LIMITS, 0.008)


@pytest.mark.parametrize("kind", ["weak", "strong"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_channel_scans_match_reference(size: tuple, kind: str) -> None:
    from slipstream.kernels.linear.sm90.vector_decay import backend

    torch.manual_seed(0)
    terms = inputs(size, kind)
    assert plan.unsupported_reason(terms) is None
    do, dfinal = gradients_of_results(terms)
    want = reference(terms, do, dfinal)
    expect(lambda: run(backend, terms, do, dfinal), want, LIMITS, 0.008)
