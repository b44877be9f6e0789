"""kda, dplr and iplr in segments, by the Gluon kernels and the portable ones: the oracle's numbers.

How a sequence is cut does not show beyond rounding, and the bits are the same twice.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.sm90 import plan
from tests.gpu.delta_runs import BARS, channels
from tests.gpu.sm90_runs import LENGTHS, MARKS, gradients_of_results, reference, run

pytestmark = MARKS

# What a segment of middling gates meets counts as nothing.
FORMS, GATES = ("kda", "dplr"), ("weak", "strong", "middling")
Way = Callable[[LinearInputs, Tensor, Tensor], dict[str, Tensor]]


def cut(monkeypatch: pytest.MonkeyPatch, tokens: int | None) -> None:
    """Both implementations, into segments of so many tokens."""
    from slipstream.kernels.linear.segments import split_into_segments
    from slipstream.kernels.linear.sm90.dplr import backend
    from slipstream.kernels.linear.triton.delta import plan as triton_delta_plan

    monkeypatch.setattr(
        backend.Sm90Dplr, "choose_segments", lambda self, terms: split_into_segments(terms, tokens)
    )
    monkeypatch.setattr(triton_delta_plan, "delta_tokens", lambda programs, T, C: tokens)


def gluon(terms: LinearInputs, do: Tensor, dfinal: Tensor) -> dict[str, Tensor]:
    from slipstream.kernels.linear.sm90.dplr import backend

    return run(backend, terms, do, dfinal)


def portable(terms: LinearInputs, do: Tensor, dfinal: Tensor) -> dict[str, Tensor]:
    from slipstream.kernels.linear.triton.dplr import backend

    return run(backend, terms, do, dfinal)


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    found = {}
    for name, x in got.items():
        y = want[name].to(x.device).double()
        found[name] = float((x.double() - y).norm() / y.norm())
    return found


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "packed"])
@pytest.mark.parametrize(
    "kind", [f"{form} {gates}" for form in FORMS for gates in GATES] + ["iplr"]
)
def test_segments_match_reference(
    kind: str, lengths: tuple | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    form, *gates = kind.split()
    terms = channels(form, "".join(gates), torch.float32, lengths)
    if form == "iplr":
        terms = terms._replace(g=None)
    do, dfinal = gradients_of_results(terms)
    assert plan.unsupported_reason(terms) is None
    want = reference(terms, do, dfinal)
    ways: tuple[Way, ...] = (gluon, portable)
    for way in ways:
        cut(monkeypatch, None)
        whole = errors(way(terms, do, dfinal), want)
        for tokens in (64, 128):
            cut(monkeypatch, tokens)
            got, again = (way(terms, do, dfinal) for _ in range(2))
            for name, error in errors(got, want).items():
                limit = max(BARS.get(name, 8e-3), 1.2 * whole[name])
                assert error <= limit, (way.__name__, tokens, name, error, whole[name])
                assert torch.equal(got[name], again[name]), name


@pytest.mark.parametrize("form", ["kda", "dplr"])
def test_segments_equal_whole_sequence(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.kernels.linear.sm90.dplr import backend

    torch.manual_seed(0)
    terms = channels(form, "weak", torch.float32, None, (1, 5000, 1, 2))
    assert backend.Sm90Dplr().choose_segments(terms) is not None
    do, dfinal = gradients_of_results(terms)
    got = gluon(terms, do, dfinal)
    cut(monkeypatch, None)
    for name, error in errors(got, gluon(terms, do, dfinal)).items():
        assert error <= 2 * BARS.get(name, 8e-3), (name, error)
