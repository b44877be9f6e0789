"""The walks with a decay per channel in Gluon on sm_90: the oracle's numbers, twice the same bits.

bench/channel_hopper.py --check has more cases.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.linear.hopper import channel_plan
from slipstream.kernels.linear.reference import linear_reference
from slipstream.kernels.linear.terms import Terms

on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not on_hopper, reason="needs sm_90")]

SIZES = {  # B, T, H, HV, lengths of packed sequences, u; K and V are 128
    "odd": (2, 230, 1, 2, None, False),
    "packed": (1, 270, 2, 4, (5, 0, 200, 1, 64), False),
    "before": (1, 150, 1, 2, None, True),
}
LIMITS = {"o": 0.005, "final": 0.005, "g": 0.02}


def inputs(size: tuple, kind: str) -> Terms:
    """Of strong gates some chunks need levels."""
    B, T, H, HV, lengths, before = size
    N = B if lengths is None else len(lengths)
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.rand(B, T, HV, 128, device="cuda")
    g = -0.1 * x
    if kind == "strong":
        g = torch.where(x < 0.01, -torch.inf, torch.where(x < 0.2, -50 * x, g))
    cu = None
    if lengths is not None:
        cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    return Terms(
        torch.randn(B, T, H, 128, **make),
        F.normalize(torch.randn(B, T, H, 128, **make), dim=-1),
        torch.randn(B, T, HV, 128, **make),
        g=g.bfloat16(),
        u=torch.randn(HV, 128, device="cuda") if before else None,
        initial_state=torch.randn(N, HV, 128, 128, device="cuda"),
        cu_seqlens=cu,
    )


def run(terms: Terms, do: Tensor, dfinal: Tensor) -> dict[str, Tensor]:
    from slipstream.kernels.linear.hopper import channel_launch

    o, final = channel_launch.forward(terms, 0.1)
    return {"o": o, "final": final, **channel_launch.backward(terms, do, dfinal, 0.1)}


@pytest.mark.parametrize("kind", ["weak", "strong"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_channel_walks_match_reference(size: tuple, kind: str) -> None:
    torch.manual_seed(0)
    terms = inputs(size, kind)
    assert channel_plan.refuses(terms) is None
    do, dfinal = torch.randn_like(terms.v), torch.randn(terms.state_shape, device="cuda")
    got, again = (run(terms, do, dfinal) for _ in range(2))
    wide = {
        name: x.cpu() if name == "cu_seqlens" else x.cpu().double().requires_grad_()
        for name, x in terms._asdict().items()
        if x is not None
    }
    o, final = linear_reference(Terms(**wide), 0.1)
    loss = (o * do.cpu()).sum() + (final * dfinal.cpu()).sum()
    live = {name: x for name, x in wide.items() if name != "cu_seqlens"}
    grads = torch.autograd.grad(loss, list(live.values()))
    want = {"o": o.detach(), "final": final.detach(), **dict(zip(live, grads))}
    for name, x in got.items():
        assert torch.equal(x, again[name]), name
        norm = max(float(want[name].norm()), 1e-30)
        error = float((x.cpu() - want[name]).norm()) / norm
        assert error <= LIMITS.get(name, 0.008), (name, error)
