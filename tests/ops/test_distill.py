"""linear_kl_div: against its formula and torch, gradients, masks, torch.compile, faults."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.common import linear_rows
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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_linear_kl_div_matches_reference(
    reduction: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(linear_rows.CHUNK_ELEMENTS, "cpu", 4 * 11)
    given, mask = inputs(), torch.rand(3, 5) > 0.3
    for some in (None, mask):
        options: dict[str, Any] = {
            "temperature": temperature, "mask": some, "reduction": reduction,
        }  # fmt: skip
        got = linear_kl_div(**given, **options)
        want = linear_kl_div(**given, **options, impl="reference")
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(grads(got, given), grads(want, given))


def test_linear_kl_div_is_torchs() -> None:
    given = inputs(torch.float32, grad=False)
    s = torch.nn.functional.linear(*(given[f"student{x}"] for x in ("", "_weight", "_bias")))
    t = torch.nn.functional.linear(*(given[f"teacher{x}"] for x in ("", "_weight", "_bias")))
    q, p = (torch.log_softmax(x.flatten(0, 1) / 2, -1) for x in (s, t))
    want = 4 * torch.nn.functional.kl_div(q, p, reduction="batchmean", log_target=True)
    torch.testing.assert_close(linear_kl_div(**given, temperature=2.0), want)


def test_linear_kl_div_grads_match_differences() -> None:
    given = inputs()
    for reduction in ("mean", "none"):

        def call(x: Tensor, w: Tensor, b: Tensor, reduction: str = reduction) -> Tensor:
            own = {**given, "student": x, "student_weight": w, "student_bias": b}
            return linear_kl_div(**own, temperature=1.5, reduction=reduction)

        leaves = tuple(given[n] for n in ("student", "student_weight", "student_bias"))
        assert torch.autograd.gradcheck(call, leaves)


def test_linear_kl_div_of_no_rows_is_zero() -> None:
    given = inputs(torch.float32)
    none = torch.zeros(3, 5, dtype=torch.bool)
    loss = linear_kl_div(**given, mask=none)
    assert loss == 0 and not any(g.any() for g in grads(loss, given))
    empty = {**given, "student": given["student"][:0], "teacher": given["teacher"][:0]}
    assert linear_kl_div(**empty) == 0
    bare = {**given, "student": given["student"][..., :0]}
    bare["student_weight"] = given["student_weight"][:, :0]
    assert linear_kl_div(**bare) > 0


def test_linear_kl_div_compiles_fullgraph() -> None:
    given = inputs(torch.float32)
    compiled = torch.compile(linear_kl_div, fullgraph=True, dynamic=True, backend="aot_eager")
    for reduction in ("mean", "none"):
        got = compiled(**given, reduction=reduction)
        want = linear_kl_div(**given, reduction=reduction)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(grads(got, given), grads(want, given))


def test_linear_kl_div_passes_opcheck() -> None:
    given = inputs(torch.float32, grad=False)
    names = ("student", "student_weight", "student_bias")
    names += ("teacher", "teacher_weight", "teacher_bias")
    tensors = [given[n].flatten(0, 1) if given[n].dim() == 3 else given[n] for n in names]
    for wants in (False, True):
        args = (*tensors, torch.rand(15) > 0.5, None, 1.5, wants, "eager")
        torch.library.opcheck(distill._CALL.overload, args)


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
