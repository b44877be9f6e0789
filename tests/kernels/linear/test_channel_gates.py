"""Erase and write by gates of channels: as free a and b where no kernel takes them as they are."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.channel_gates import as_dplr
from slipstream.kernels.linear.inputs import BackwardCall, LinearInputs
from slipstream.kernels.linear.op import backward_impl, by_name, forward_impl
from slipstream.kernels.linear.reference import linear_reference
from slipstream.kernels.linear.sm90 import plan

NAMES = ("q", "k", "v", "g", "erase", "write")


def inputs(dtype: torch.dtype = torch.float64, K: int = 16) -> LinearInputs:
    B, T, H, HV, V = 2, 20, 1, 2, 32
    torch.manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(B, T, *shape).to(dtype)

    q, k = (torch.nn.functional.normalize(rand(H, K) - 0.5, dim=-1) for _ in "qk")
    return LinearInputs(
        q, k, rand(HV, V) - 0.5, g=-rand(HV, K), erase=2 * rand(HV, K), write=rand(HV, V)
    )


def test_other_back_ends_give_the_same() -> None:
    """Forward and backward where the kernels for sm_90 have failed, and terms turned into
    a and b beforehand."""
    terms = inputs()
    leaves = [getattr(terms, n).clone().requires_grad_() for n in NAMES]
    o, state = linear_reference(LinearInputs(**dict(zip(NAMES, leaves))), 0.3)
    do, dstate = torch.randn_like(o), torch.randn_like(state)
    want = torch.autograd.grad((o, state), leaves, (do, dstate))
    for got, right in zip(forward_impl(*terms, 0.3, 16, "eager", False), (o, state)):
        torch.testing.assert_close(got, right.detach())
    call = BackwardCall(do, dstate, 0.3, 16, "eager")
    got = by_name(terms, True, backward_impl(*terms, *call))
    for name, right in zip(NAMES, want, strict=True):
        torch.testing.assert_close(got[name], right)
    for got, right in zip(linear_reference(as_dplr(terms), 0.3), (o, state)):
        torch.testing.assert_close(got, right.detach())


@pytest.mark.parametrize("name", ["erase", "write", "g", "K"])
def test_sm90_refuses_other_gates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is begun: gradients are left to no other kernel."""
    monkeypatch.setattr(plan.backends, "sm90_unsupported", lambda x: None)
    monkeypatch.setattr(plan.guarded_launch, "known_failure", lambda make, device: None)
    terms = inputs(torch.bfloat16, K=64)
    terms = terms._replace(v=terms.v.repeat(1, 1, 1, 2), write=terms.write.repeat(1, 1, 1, 2))
    assert plan.unsupported_reason(terms) is None
    if name == "K":
        terms = inputs(torch.bfloat16, K=48)
    else:
        terms = terms._replace(**{name: getattr(terms, name).double()})
    assert plan.unsupported_reason(terms) is not None
