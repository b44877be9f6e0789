"""The kernels of attention over the depth under Triton's interpreter, beside float64."""

import torch

from slipstream.kernels.attnres import op
from slipstream.kernels.attnres.inputs import AttnresInputs
from tests.support.interpreted import interpreted


def check(normed: bool) -> None:
    """Scores far apart: gradients of scores are differences of what o's rounding would leave."""
    torch.manual_seed(0)
    rows = [torch.randn(6, 512).half() for _ in range(5)]
    query, weight, last = torch.randn(3, 512).unbind()
    leaves = [x.requires_grad_() for x in rows]
    last = last if normed else None
    y, _ = op._run(AttnresInputs(query, leaves, weight, last, 1e-6, 1.0), "triton")
    wide = [x.detach().double().requires_grad_() for x in rows]
    given = query.double(), wide, weight.double(), None if last is None else last.double()
    want, p = op.eager(AttnresInputs(*given, 1e-6, 1.0))
    assert p.softmax(0).max() > 0.999
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, leaves, dy)
    for x, right in zip(got, torch.autograd.grad(want, wide, dy.double()), strict=True):
        assert (x.double() - right).norm() < 5e-4 * right.norm()


def check_eps_of_zero() -> None:
    """Rows past the last of a tile are zeros, of which no norm is taken."""
    torch.manual_seed(0)
    given = [torch.randn(3, 7) for _ in range(2)] + [*torch.randn(3, 7).unbind()]
    found = []
    for call, dtype in ((op._run, torch.float32), (op.eager, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in given]
        *rows, query, weight, last = leaves
        more = ("triton",) if dtype == torch.float32 else ()
        y = call(AttnresInputs(query, rows, weight, last, 0.0, 0.7), *more)[0]
        found.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def check_one_residual() -> None:
    """The scores of a softmax of one have no gradient, however o is rounded."""
    query, weight = torch.randn(2, 512).unbind()
    query.requires_grad_()
    rows = [torch.randn(6, 512).half()]
    y, _ = op._run(AttnresInputs(query, rows, weight, None, 1e-6, 1.0), "triton")
    assert torch.autograd.grad(y, query, torch.randn_like(y))[0].count_nonzero() == 0


@interpreted
def test_one_residual_with_all_the_weight() -> None:
    check_eps_of_zero()
    check_one_residual()
    for with_norm in (False, True):
        check(with_norm)
