"""linear_kl_div: against its formula and torch, gradients, masks, torch.compile, faults."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.loss import distill
from slipstream.ops.distill import linear_kl_div

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
