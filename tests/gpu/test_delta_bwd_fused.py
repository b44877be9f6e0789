"""The delta rule's backward in one scan on sm_90, in parts and segments: the oracle's numbers, the
same bits each time, with what forward left and without."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.kernels.linear import segments
from slipstream.kernels.linear.backend import SavedWY
from tests.gpu.delta_runs import LIMIT, SIZES, inputs
from tests.gpu.sm90_runs import LENGTHS, MARKS, SCALE, expect, gradients_of_results, reference, run

pytestmark = MARKS

# B, T, H, HV, K, V, lengths of packed sequences; chunks of a part, parts of a segment
CUTS = {
    "whole": ((2, 330, 2, 4, 128, 128, None), 6, 0),
    "parts": ((2, 330, 2, 4, 128, 128, None), 4, 0),
    "narrow": ((2, 330, 2, 4, 64, 64, None), 2, 0),
    "packed": ((1, 470, 1, 4, 128, 128, (5, 0, 200, 1, 264)), 2, 0),
    # more programs than run at a time
    "many": ((1, 5800, 1, 2, 128, 128, (130, 3, 70, 87) * 20), 2, 0),
    "segments": ((1, 1000, 2, 4, 128, 128, None), 3, 2),
    "segments, narrow keys": ((1, 1216, 1, 3, 64, 128, None), 2, 2),
    "segments of a batch": ((2, 700, 2, 2, 128, 128, None), 3, 1),
    "packed segments": ((1, 1270, 1, 4, 128, 128, (70, 0, 1200)), 2, 3),
    "even segments": ((1, 1280, 2, 8, 128, 128, (640, 640)), 5, 1),
}
GATES = {"none": None, "faint": 0.001, "weak": 0.1, "strong": 3.0}


@pytest.mark.parametrize("strength", GATES.values(), ids=GATES)
@pytest.mark.parametrize("given", CUTS.values(), ids=CUTS)
def test_parts_match_reference(
    given: tuple, strength: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.kernels.linear.sm90.delta import backend, bwd_schedule

    size, every, parts = given
    torch.manual_seed(0)
    terms = inputs(size, False)
    cut = bwd_schedule.make_schedule(terms, every, parts)
    monkeypatch.setattr(backend, "choose_schedule", lambda terms: cut)
    if strength is not None:
        terms = terms._replace(g=-strength * torch.rand(*terms.v.shape[:3], device="cuda"))
    do, dfinal = gradients_of_results(terms)
    want, kept = reference(terms, do, dfinal), [True, True, False, False]

    def made() -> dict[str, Tensor]:
        o, final, *left = backend.forward(terms, SCALE, save=True)
        found = SavedWY(*left) if kept.pop() else None
        return {"o": o, "final": final, **backend.backward(terms, do, dfinal, SCALE, saved=found)}

    expect(made, want, {}, 2 * LIMIT)
    expect(made, want, {}, 2 * LIMIT)


ONE_SCAN = SIZES | {"shared": (3, 200, 2, 8, 128, 128, None), "narrow": (2, 90, 2, 4, 64, 64, None)}


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("size", ONE_SCAN.values(), ids=ONE_SCAN)
def test_backward_in_one_scan_matches_reference(
    size: tuple, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the shapes alone say, gates of -inf among them."""
    from slipstream.kernels.linear.sm90.delta import backend

    torch.manual_seed(0)
    monkeypatch.setattr(segments, "FUSED_BWD_MIN_HEADS", 1)
    terms = inputs(size, gated)
    do, dfinal = gradients_of_results(terms)
    want = reference(terms, do, dfinal)
    expect(lambda: run(backend, terms, do, dfinal), want, {}, 2 * LIMIT)


def test_retained_graph_keeps_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Played from a record, too: the same bits each time."""
    from slipstream.kernels.linear.sm90.delta import backend, bwd_schedule

    torch.manual_seed(0)
    terms = inputs((1, 271, 2, 4, 128, 128, LENGTHS[:2] + (201,) + LENGTHS[3:]), True)
    cut, left = bwd_schedule.make_schedule(terms, 2), []

    def marks_like(*given: Any) -> Tensor:
        left.append(bwd_schedule.empty_checkpoints(*given))
        return left[-1]

    monkeypatch.setattr(backend, "choose_schedule", lambda terms: cut)
    monkeypatch.setattr(backend, "empty_checkpoints", marks_like)
    names = ("q", "k", "v", "g", "beta")
    args = {n: getattr(terms, n).requires_grad_() for n in names}
    do = torch.randn_like(terms.v)
    for _ in range(4):  # from the third on from a record
        o = ops.chunk_gated_delta_rule(**args, cu_seqlens=terms.cu_seqlens)[0]
        first, again, last = (
            torch.autograd.grad(o, list(args.values()), do, retain_graph=stays)
            for stays in (True, True, False)
        )
        for x, y, z in zip(first, again, last):
            assert torch.equal(x, y)
            assert torch.equal(x, z)
    assert left and all(len(x) == cut.checkpoints for x in left)
