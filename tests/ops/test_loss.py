"""The losses beside torch's, what they hold in memory, and what they refuse."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common import linear_rows
from slipstream.kernels.loss import distill, eager
from slipstream.ops import linear_log_probs
from slipstream.ops.loss import cross_entropy, linear_cross_entropy, linear_kl_div
from tests.support.ignored_rows import faults, of_modules, of_operators
from tests.support.interpreted import interpreted


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


def test_log_probs_in_chunks_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(2, 13, 6).double(), torch.randn(11, 6).double()
    target = torch.randint(0, 11, (2, 13))
    target[0, 3] = -100
    found = []
    for most in (1 << 20, 40):
        monkeypatch.setitem(linear_rows.CHUNK_ELEMENTS, "cpu", most)
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        log_prob, entropy = linear_log_probs(*leaves, target, return_entropy=True)
        loss = (log_prob.sin() + 0.1 * entropy.square()).sum()
        found.append([log_prob, entropy, *torch.autograd.grad(loss, leaves)])
    assert len(linear_rows.row_chunks(hidden.flatten(0, 1), 11)) == 9
    torch.testing.assert_close(found[0], found[1])
    assert found[0][0][0, 3] == found[0][1][0, 3] == 0 and not found[0][2][0, 3].any()


def test_log_probs_alone_are_those_beside_entropies() -> None:
    hidden, weight, bias = torch.randn(7, 6), torch.randn(11, 6), torch.randn(11)
    target = torch.randint(0, 11, (7,))
    both, _ = linear_log_probs(hidden, weight, target, bias, temperature=2.0, return_entropy=True)
    alone = linear_log_probs(hidden, weight, target, bias, temperature=2.0)
    torch.testing.assert_close(alone, both)
    want = ((hidden @ weight.t() + bias) / 2).log_softmax(-1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(both, want)


def test_log_probs_of_classes_that_cannot_be() -> None:
    hidden, weight = torch.randn(5, 6, requires_grad=True), torch.randn(4, 6)
    bias = torch.tensor([0.0, -torch.inf, 0.0, 0.0])
    target = torch.tensor([0, 2, 3, 0, 2])
    log_prob, entropy = linear_log_probs(hidden, weight, target, bias, return_entropy=True)
    p = (hidden @ weight.t())[:, [0, 2, 3]].log_softmax(-1)
    want = p.gather(1, torch.tensor([0, 1, 2, 0, 1])[:, None])[:, 0], -(p.exp() * p).sum(-1)
    torch.testing.assert_close(entropy, want[1])
    # the gradient that comes in may be any number
    for factor in (0.1, 1.0, 30.0):
        found, wanted = (
            torch.autograd.grad((a + factor * b).sum(), hidden, retain_graph=True)[0]
            for a, b in ((log_prob, entropy), want)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


SHAPES = {
    "student": (3, 5, 6), "student_weight": (11, 6), "teacher": (3, 5, 4),
    "teacher_weight": (11, 4), "student_bias": (11,), "teacher_bias": (11,),
}  # fmt: skip


def inputs(dtype: torch.dtype = torch.float64, grad: bool = True) -> dict[str, Any]:
    return {
        name: torch.randn(s, dtype=dtype).requires_grad_(grad and name.startswith("student"))
        for name, s in SHAPES.items()
    }


def grads(loss: Tensor, given: dict[str, Tensor]) -> list[Tensor]:
    leaves = [x for x in given.values() if x.requires_grad]
    return list(torch.autograd.grad(loss.double().cos().sum(), leaves))


def test_linear_kl_div_is_torchs() -> None:
    given = inputs(torch.float32, grad=False)
    s = torch.nn.functional.linear(*(given[f"student{x}"] for x in ("", "_weight", "_bias")))
    t = torch.nn.functional.linear(*(given[f"teacher{x}"] for x in ("", "_weight", "_bias")))
    q, p = (torch.log_softmax(x.flatten(0, 1) / 2, -1) for x in (s, t))
    want = 4 * torch.nn.functional.kl_div(q, p, reduction="batchmean", log_target=True)
    torch.testing.assert_close(linear_kl_div(**given, temperature=2.0), want)


def test_linear_kl_div_compiles_fullgraph() -> None:
    given = inputs(torch.float32)
    compiled = torch.compile(linear_kl_div, fullgraph=True, dynamic=True, backend="aot_eager")
    for reduction in ("mean", "none"):
        got = compiled(**given, reduction=reduction)
        want = linear_kl_div(**given, reduction=reduction)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(grads(got, given), grads(want, given))


def test_linear_kl_div_rejects_what_does_not_fit() -> None:
    given = inputs(torch.float32)
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"student_weight": torch.randn(0, 6)}, ValueError, "student_weight: want at least one"),
        ({"mask": torch.ones(3, 5)}, TypeError, "mask: want torch.bool"),
        ({"reduction": "batchmean"}, ValueError, "reduction: want"),
        ({"teacher": torch.randn(3, 5, 4).requires_grad_()}, NotImplementedError, "detach"),
    ]
    for change, kind, text in bad:
        with pytest.raises(kind, match=text):
            linear_kl_div(**{**given, **change})


def test_no_gradients_are_made_where_none_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    call = distill._CALL

    def recorded(*args: Any, **options: Any) -> Any:
        asked.append(options["grads"])
        return call(*args, **options)

    monkeypatch.setattr(distill, "_CALL", recorded)
    for reduction in ("mean", "none"):
        linear_kl_div(**inputs(grad=False), reduction=reduction)
    assert asked == [False, False]


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_rows_without_a_loss_have_no_gradient(impl: str) -> None:
    assert faults(of_operators(impl)) == []


def test_modules_give_rows_without_a_loss_no_gradient() -> None:
    assert faults(of_modules()) == []


def test_compiled_rows_without_a_loss_have_no_gradient() -> None:
    for loss in of_operators(None):
        torch.compiler.reset()
        call = torch.compile(loss.call, fullgraph=True, dynamic=False, backend="aot_eager")
        assert faults([loss._replace(call=call)]) == []


@interpreted
def test_triton_rows_without_a_loss_have_no_gradient() -> None:
    assert faults(of_operators("triton")) == []


@pytest.mark.parametrize("grads", [False, True])
def test_teacher_of_triton_has_no_gradients(grads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would be as large as its weight."""
    kl_div = pytest.importorskip("slipstream.kernels.loss.triton.kl_div")
    made: list[bool] = []
    layer = kl_div.LinearRows
    monkeypatch.setattr(kl_div, "LinearRows", lambda *x: made.append(x[3]) or layer(*x))
    rows = torch.empty(0, 4), torch.empty(6, 4), None
    kl_div.linear_rows(rows, rows, None, None, 1.0, grads)
    assert made == [grads, False]
