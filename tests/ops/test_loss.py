"""The losses beside torch's, what they hold in memory, and what they refuse."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slipstream.common import linear_rows
from slipstream.kernels.loss import eager
from slipstream.ops.loss import cross_entropy, linear_cross_entropy


def test_linear_cross_entropy_chunk_independence(monkeypatch: Any) -> None:
    hidden, weight = torch.randn(50, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    target = torch.randint(0, 30, (50,))

    def run() -> list[torch.Tensor]:
        loss = linear_cross_entropy(hidden, weight, target)
        return [loss, *torch.autograd.grad(loss, (hidden, weight))]

    whole = run()
    monkeypatch.setitem(linear_rows.CHUNK_ELEMENTS, "cpu", 7 * 30)
    torch.testing.assert_close(run(), whole)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_of_ignored_rows_are_zero(reduction: str) -> None:
    hidden = torch.full((3, 4), torch.inf, requires_grad=True)
    target = torch.full((3,), 7)
    weight = torch.randn(9, 4)
    for loss in (
        linear_cross_entropy(hidden, weight, target, ignore_index=7, reduction=reduction),
        cross_entropy(hidden, target, ignore_index=7, reduction=reduction),
    ):
        assert torch.equal(loss, torch.zeros_like(loss))
    loss = cross_entropy(hidden, target, ignore_index=7)
    (grad,) = torch.autograd.grad(loss, hidden)
    assert torch.equal(grad, torch.zeros_like(grad))


def test_cross_entropy_takes_logits_of_minus_infinity() -> None:
    logits = torch.randn(4, 6)
    logits[:, 0] = -torch.inf
    logits.requires_grad_()
    loss = cross_entropy(logits, torch.tensor([1, 2, 3, 4]), z_loss=0.1)
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite()
    assert grad.isfinite().all()


def test_linear_cross_entropy_skips_unused_gradients(monkeypatch: Any) -> None:
    wanted = []
    original = eager.linear_rows

    def spy(*args: Any) -> Any:
        wanted.append(args[-1])
        return original(*args)

    monkeypatch.setattr(eager, "linear_rows", spy)
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(6, 4)
    target = torch.randint(0, 6, (5,))
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, target)
    linear_cross_entropy(hidden.detach(), weight, target)
    linear_cross_entropy(hidden, weight, target)
    assert wanted == [False, False, True]


def test_losses_reject_faults_by_name() -> None:
    hidden, weight, target = torch.randn(5, 4), torch.randn(6, 4), torch.randint(0, 6, (5,))
    logits, outside = hidden @ weight.t(), target.clone()
    outside[3] = 6
    for call, error, word in [
        (lambda: cross_entropy(logits, outside), ValueError, r"target: id 6 at position \(3,\)"),
        (
            lambda: linear_cross_entropy(hidden, weight, outside),
            ValueError,
            "target: id 6 .* vocabulary of 6",
        ),
        (lambda: cross_entropy(logits[:, :0], target), ValueError, "logits: want at least one"),
        (lambda: linear_cross_entropy(hidden, weight[:0], target), ValueError, "weight: want at"),
        (lambda: cross_entropy(logits, target.int()), TypeError, "target"),
        (lambda: cross_entropy(logits, target, softcap=0.0), ValueError, "softcap"),
    ]:
        with pytest.raises(error, match=word):
            call()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_float16_gradients_of_a_scaled_loss_are_torchs(reduction: str) -> None:
    """float16 holds the gradients, but not the scale, nor an unscaled row's share of the mean."""
    hidden, weight = 0.3 * torch.randn(64, 32), 0.05 * torch.randn(50, 32)
    target = torch.randint(0, 50, (64,))

    def grad(loss: Any, dtype: torch.dtype) -> torch.Tensor:
        x = hidden.half().to(dtype).requires_grad_()
        (65536 * loss(x, weight.half().to(dtype))).sum().backward()
        assert x.grad is not None
        return x.grad.double()

    want = grad(
        lambda x, w: F.cross_entropy(F.linear(x, w), target, reduction=reduction), torch.float64
    )
    assert 1 < float(want.abs().max()) < 65504

    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, w, target, reduction=reduction)

    def apart(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return cross_entropy(F.linear(x, w), target, reduction=reduction)

    for loss in (linear, apart):
        got = grad(loss, torch.float16)
        assert float((got - want).norm()) < 2e-3 * float(want.norm())
