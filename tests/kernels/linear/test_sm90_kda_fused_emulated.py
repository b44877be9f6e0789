"""KDA's forward in one kernel on sm_90 as numpy against the oracle: in float64, and rounded as on a
GPU (tests/gluon_emulator/rounding.py) where gates are strong."""

import itertools

import pytest
import torch

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from tests.gluon_emulator import linear as emulator
from tests.gluon_emulator.rounding import rounded
from tests.support.causality import with_other_future
from tests.support.sm90_dplr import C, inputs
from tests.support.sm90_kda_fused import GATES, SCALE, as_given, run

# T, H, HV, K, V, batch or lengths of packed sequences, of the delta rule, gated
ROWS = (150, 1, 2, 128, 128, 2, True, True)
PACKED = (210, 1, 1, 128, 128, (64, 5, 0, 130), True, True)


def errors(terms: LinearInputs, rounds: bool = False) -> list[float]:
    """Of o and the final states; what no token is of is not written."""
    end = terms.q.shape[1] if terms.cu_seqlens is None else int(terms.cu_seqlens[-1])
    o, final = run(terms, rounds)
    assert o[:, end:].isnan().all()
    want = linear_reference(terms.of_tokens(lambda x: x[:, :end]), SCALE)
    pairs = zip((o[:, :end], final), want)
    return [float((x - y).norm() / y.norm().clamp(min=1e-30)) for x, y in pairs]


@pytest.mark.parametrize("beta", [None, 0.0, 1.0])
@pytest.mark.parametrize("size", [ROWS, PACKED], ids=["rows", "packed"])
def test_fused_forward_matches_reference(size: tuple, beta: float | None) -> None:
    terms = inputs(size)
    if beta is not None:
        terms = terms._replace(beta=torch.full(terms.v.shape[:3], beta, dtype=torch.float64))
    assert all(x <= 1e-8 for x in errors(terms))


@pytest.mark.parametrize("gates", GATES)
def test_any_gate_matches_reference(gates: str) -> None:
    terms = as_given(inputs(PACKED, GATES[gates]))
    with rounded():
        assert all(x <= 1e-2 for x in errors(terms, rounds=True))


@pytest.mark.parametrize(
    ("gates", "cut", "strength"), [("to -0.1", 25, 2e4), ("-20", 21, 1e-3), ("to -50", 70, 1.0)]
)
def test_fused_past_keeps_its_bits(gates: str, cut: int, strength: float) -> None:
    """Whatever the future's tokens and gates; chunks change from weak to strong and back."""
    terms = as_given(inputs((140, 1, 1, 128, 128, 1, True, True), GATES[gates]))
    other = as_given(with_other_future(terms, cut, strength))
    with rounded():
        want, got = (run(x, rounds=True)[0] for x in (terms, other))
    assert torch.equal(got[:, :cut], want[:, :cut])
    assert not torch.equal(got[:, cut:], want[:, cut:])


def test_sequences_do_not_meet_their_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their NaN, that is. Those past the last one are in all packed inputs here."""
    monkeypatch.setattr(emulator, "INPUTS_HAVE_NAN", True)
    terms = inputs(PACKED)
    assert terms.cu_seqlens is not None
    want, ends = run(terms)
    places = [*itertools.pairwise(terms.cu_seqlens.tolist())]
    for bad, here in enumerate(places):
        poisoned = terms.of_tokens(torch.Tensor.clone)
        poisoned.of_tokens(lambda x, a=here: x[:, slice(*a)].fill_(torch.nan))
        got, final = run(poisoned)
        for n, (a, b) in enumerate(places):
            if n != bad:
                assert torch.equal(got[:, a:b], want[:, a:b]), (bad, n)
                assert torch.equal(final[n], ends[n])


@pytest.mark.parametrize("strength", [0.1, 5.0, 90.0])
def test_nan_gate_reaches_later_outputs_of_its_head(
    strength: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulator, "INPUTS_HAVE_NAN", True)
    terms = inputs(ROWS, lambda x: -strength * x)
    for token in (70, 120):
        other = terms.of_tokens(torch.Tensor.clone)
        assert other.g is not None
        other.g[0, token, 0, 5] = torch.nan
        o, final = run(other)
        assert o[0, token:, 0].isnan().all() and final[0, 0].isnan().any()
        assert not o[0, :C].isnan().any() and not o[1:].isnan().any()
        assert not o[:, :, 1].isnan().any()
