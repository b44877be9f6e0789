"""The linear family's kernels for sm_90 against the reference, whole and in segments."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.kernels.linear import plan, segments
from slipstream.kernels.linear.backend import SavedWY
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import TILE_V
from slipstream.kernels.linear.sm90.delta import backend as delta
from slipstream.kernels.linear.sm90.delta import bwd_schedule
from slipstream.kernels.linear.sm90.dplr import backend as dplr
from slipstream.kernels.linear.sm90.scalar_decay import backend as scalar_decay
from slipstream.kernels.linear.sm90.vector_decay import backend as vector_decay
from slipstream.kernels.linear.triton.delta import plan as triton_delta_plan
from slipstream.kernels.linear.triton.dplr import backend as triton_dplr
from tests.gpu.delta_runs import BARS, LIMIT, SIZES, channels, inputs
from tests.gpu.sm90_runs import LENGTHS, MARKS, SCALE, expect, gradients_of_results, reference, run

pytestmark = MARKS


# ---- The delta rule's scans in Gluon on sm_90: the oracle's numbers, twice the same bits.


SPLITS = {  # how strong gates are, and what cuts T
    "faint": (0.001, None),
    "weak": (0.1, None),
    "strong": (2.0, None),
    "packed": (0.05, (5, 475)),
    "a slot more than segments": (0.05, (100, 0, 380)),
}


@pytest.mark.parametrize("kept", [False, True], ids=["anew", "kept"])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_delta_segments_match_reference(
    split: tuple, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "MIN_SEGMENT_CHUNKS", 1)
    monkeypatch.setattr(segments, "LAUNCH_COST", 1)
    fresh = vars(segments._delta_sm90_tokens)["__wrapped__"]  # without its cache
    monkeypatch.setattr(segments, "_delta_sm90_tokens", fresh)
    torch.manual_seed(0)
    strength, lengths = split
    terms = inputs((1, 480, 1, 2, 128, 128, lengths), False)
    g = -strength * torch.rand(1, 480, 2, device="cuda")
    terms = terms._replace(g=g)
    assert segments.delta_sm90(terms) is not None
    do, dfinal = gradients_of_results(terms)

    def both() -> dict[str, Tensor]:
        o, final, *left = delta.forward(terms, SCALE, save=True)
        given = SavedWY(*left) if kept else None
        return {"o": o, "final": final, **delta.backward(terms, do, dfinal, SCALE, saved=given)}

    expect(both, reference(terms, do, dfinal), {}, 2 * LIMIT)


@pytest.mark.parametrize(("heads", "together"), [(3, 3), (4, 4), (6, 3)])
def test_gradients_of_shared_heads_match_reference(heads: int, together: int) -> None:
    """Three and four add theirs up by TMA; of six so do three and three, and a kernel the rest."""
    torch.manual_seed(0)
    terms = inputs((1, 270, 2, 2 * heads, 128, 128, LENGTHS), False)
    terms = terms._replace(g=-0.3 * torch.rand(1, 270, 2 * heads, device="cuda"))
    assert delta.Sm90Delta().heads_per_sum(terms) == together
    do, dfinal = gradients_of_results(terms)
    expect(lambda: run(delta, terms, do, dfinal), reference(terms, do, dfinal), {}, 2 * LIMIT)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("gates", ["weak", "middling", "strong"])
@pytest.mark.parametrize("kind", ["kda", "dplr", "gdn2"])
def test_gates_a_channel_match_reference(
    kind: str, gates: str, dtype: torch.dtype, lengths: tuple | None
) -> None:
    torch.manual_seed(0)
    terms = channels(kind, gates, dtype, lengths)
    do, dfinal = gradients_of_results(terms)
    assert plan.sm90_unsupported_reason(terms) is None
    assert dplr.supports_dqkg(terms, do)
    want = reference(terms, do, dfinal)
    got = expect(lambda: run(dplr, terms, do, dfinal), want, BARS, 8e-3)
    assert got["g"].dtype == dtype


# ---- The delta rule's backward in one scan on sm_90, in parts and segments: the oracle's numbers,
# the same bits each time, with what forward left and without.


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
    size, every, parts = given
    torch.manual_seed(0)
    terms = inputs(size, False)
    cut = bwd_schedule.make_schedule(terms, every, parts)
    monkeypatch.setattr(bwd_schedule, "choose_schedule", lambda terms: cut)
    if strength is not None:
        terms = terms._replace(g=-strength * torch.rand(*terms.v.shape[:3], device="cuda"))
    do, dfinal = gradients_of_results(terms)
    want, kept = reference(terms, do, dfinal), [True, True, False, False]

    def made() -> dict[str, Tensor]:
        o, final, *left = delta.forward(terms, SCALE, save=True)
        found = SavedWY(*left) if kept.pop() else None
        return {"o": o, "final": final, **delta.backward(terms, do, dfinal, SCALE, saved=found)}

    expect(made, want, {}, 2 * LIMIT)
    expect(made, want, {}, 2 * LIMIT)


SHAPES = SIZES | {"shared": (3, 200, 2, 8, 128, 128, None), "narrow": (2, 90, 2, 4, 64, 64, None)}


@pytest.mark.parametrize("way", ["one scan", "states first", "one kernel"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("size", SHAPES.values(), ids=SHAPES)
def test_delta_rule_matches_reference(
    size: tuple, gated: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates of -inf among them; backward in one scan, or behind one of the states, and forward in
    one kernel, whose programs take several heads."""
    torch.manual_seed(0)
    if way == "one scan":
        monkeypatch.setattr(segments, "FUSED_BWD_MIN_HEADS", 1)
    if way == "one kernel":
        if size[5] % (2 * TILE_V):
            pytest.skip("one tile is as wide as V")
        monkeypatch.setattr(delta.Sm90Delta, "fuses", lambda self, terms: True)
        monkeypatch.setattr(segments, "NUM_SMS", 3)
    terms = inputs(size, gated)
    assert plan.sm90_unsupported_reason(terms) is None
    do, dfinal = gradients_of_results(terms)
    want = reference(terms, do, dfinal)
    expect(lambda: run(delta, terms, do, dfinal), want, {}, 2 * LIMIT)


def test_retained_graph_keeps_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Played from a record, too: the same bits each time."""
    torch.manual_seed(0)
    terms = inputs((1, 271, 2, 4, 128, 128, LENGTHS[:2] + (201,) + LENGTHS[3:]), True)
    cut, left = bwd_schedule.make_schedule(terms, 2), []
    empty_checkpoints = bwd_schedule.empty_checkpoints

    def marks_like(*given: Any) -> Tensor:
        left.append(empty_checkpoints(*given))
        return left[-1]

    monkeypatch.setattr(bwd_schedule, "choose_schedule", lambda terms: cut)
    monkeypatch.setattr(bwd_schedule, "empty_checkpoints", marks_like)
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


# ---- The additive family's scans in Gluon on sm_90: the oracle's numbers, twice the same bits.


LIMITS = {"o": 0.005, "final": 0.005, "g": 0.02}


@pytest.mark.parametrize("K", plan.SCALAR_DECAY_WIDTHS)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_additive_scans_match_reference(size: tuple, gated: bool, K: int) -> None:
    torch.manual_seed(0)
    terms = inputs((*size[:4], K, K, size[6]), gated)._replace(beta=None)
    assert plan.sm90_unsupported_reason(terms) is None
    do, dfinal = gradients_of_results(terms)
    want = reference(terms, do, dfinal)
    expect(lambda: run(scalar_decay, terms, do, dfinal), want, LIMITS, 0.008)


# ---- Per-channel decay by the Gluon kernels on sm_90: the reference's numbers, the same bits
# twice.


VECTOR_SIZES = {  # B, T, H, HV, lengths of packed sequences, u; K and V are 128
    "odd": (2, 230, 1, 2, None, False),
    "packed": (1, 270, 2, 4, LENGTHS, False),
    "before": (1, 150, 1, 2, None, True),
    "packed before": (1, 270, 2, 4, LENGTHS, True),
}


def vector_inputs(size: tuple, kind: str) -> LinearInputs:
    """With strong gates some chunks need levels."""
    B, T, H, HV, lengths, before = size
    x = torch.rand(B, T, HV, 128, device="cuda")
    g = -0.1 * x
    if kind == "strong":
        g = torch.where(x < 0.01, -torch.inf, torch.where(x < 0.2, -50 * x, g))
    u = torch.randn(HV, 128, device="cuda") if before else None
    terms = inputs((B, T, H, HV, 128, 128, lengths), False)
    return terms._replace(g=g.bfloat16(), u=u, beta=None)


@pytest.mark.parametrize("tokens", [None, 64, 128])
@pytest.mark.parametrize("kind", ["weak", "strong"])
@pytest.mark.parametrize("size", VECTOR_SIZES.values(), ids=VECTOR_SIZES)
def test_channel_scans_match_reference(
    size: tuple, kind: str, tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares the forward in segments, too."""
    torch.manual_seed(0)
    terms = vector_inputs(size, kind)
    assert plan.sm90_unsupported_reason(terms) is None
    do, dfinal = gradients_of_results(terms)

    def both() -> dict[str, Tensor]:
        if tokens is None:
            return run(vector_decay, terms, do, dfinal)
        return dict(zip(("o", "final"), vector_decay.forward(terms, SCALE), strict=True))

    if tokens is not None:
        cut = segments.split_into_segments(terms, tokens)
        monkeypatch.setattr(vector_decay.segmentation, "vector_decay_sm90", lambda x: cut)
    expect(both, reference(terms, do, dfinal), LIMITS, 0.008)


# ---- kda, dplr and iplr in segments, by the Gluon kernels and the portable ones: the oracle's
# numbers. How a sequence is cut does not show beyond rounding, and the bits are the same twice.


# What a segment of middling gates meets counts as nothing.
FORMS, SEGMENT_GATES = ("kda", "dplr"), ("weak", "strong", "middling")


def cut(monkeypatch: pytest.MonkeyPatch, tokens: int | None) -> None:
    """Both implementations, into segments of that length, in tokens."""
    split = segments.split_into_segments
    monkeypatch.setattr(dplr.Sm90Dplr, "choose_segments", lambda self, terms: split(terms, tokens))
    monkeypatch.setattr(triton_delta_plan, "delta_tokens", lambda programs, T, C: tokens)


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    found = {}
    for name, x in got.items():
        y = want[name].to(x.device).double()
        found[name] = float((x.double() - y).norm() / y.norm())
    return found


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "packed"])
@pytest.mark.parametrize(
    "kind", [f"{form} {gates}" for form in FORMS for gates in SEGMENT_GATES] + ["iplr"]
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
    assert plan.sm90_unsupported_reason(terms) is None
    want = reference(terms, do, dfinal)
    for way in (dplr, triton_dplr):
        cut(monkeypatch, None)
        whole = errors(run(way, terms, do, dfinal), want)
        for tokens in (64, 128):
            cut(monkeypatch, tokens)
            got, again = (run(way, terms, do, dfinal) for _ in range(2))
            for name, error in errors(got, want).items():
                limit = max(BARS.get(name, 8e-3), 1.2 * whole[name])
                assert error <= limit, (way.__name__, tokens, name, error, whole[name])
                assert torch.equal(got[name], again[name]), name


@pytest.mark.parametrize("form", ["kda", "dplr"])
def test_segments_equal_whole_sequence(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    terms = channels(form, "weak", torch.float32, None, (1, 5000, 1, 2))
    assert dplr.Sm90Dplr().choose_segments(terms) is not None
    do, dfinal = gradients_of_results(terms)
    got = run(dplr, terms, do, dfinal)
    cut(monkeypatch, None)
    for name, error in errors(got, run(dplr, terms, do, dfinal)).items():
        assert error <= 2 * BARS.get(name, 8e-3), (name, error)
