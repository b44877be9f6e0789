"""The linear family's launches on sm_90 from forward to gradients, with kernels as numpy, a thread
for each part, against the oracle. Sums, masks, rings, phases and segments are those of the kernels;
layouts and rounding are not there (tests/gluon_emulator/threads.py says what is)."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear import segments
from slipstream.kernels.linear.backend import SavedWY
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.prefix_states import PrefixStates
from slipstream.kernels.linear.reference import linear_reference
from tests.gluon_emulator import launches
from tests.gluon_emulator import linear as emulator
from tests.support import wants
from tests.support.causality import with_other_future
from tests.support.operators import never_written, numbers_of_no_chunk
from tests.support.sm90_linear import (
    SCALE,
    C,
    backend,
    cut_by,
    end_of,
    fused_by,
    inputs,
    near,
    wanted,
)

pytestmark = wants.compiler


class Way(NamedTuple):
    """chosen: has a call go this way, and names kernels that run then."""

    chosen: Callable[[pytest.MonkeyPatch], set[str]]
    kind: str
    size: tuple[int, ...]  # T, H, HV, K, V
    batch: int | tuple[int, ...] = 1
    gates: str = "own"
    state: bool = True
    before: bool = False

    def inputs(self) -> LinearInputs:
        return inputs(*self[1:6], before=self.before)


def by_shapes(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    return set()


def two_kernels(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    return {"solve_tril", "chunk_fwd", "chunk_dstate", "dqkg"}


def many_heads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Of which a program takes several."""
    fused_by()(monkeypatch)
    monkeypatch.setattr(segments, "NUM_SMS", 3)
    return two_kernels(monkeypatch) | {"fused_fwd"}


def in_segments(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.setattr(segments, "MIN_SEGMENT_CHUNKS", 1)
    monkeypatch.setattr(segments, "LAUNCH_COST", 1)
    fresh = vars(segments._delta_sm90_tokens)["__wrapped__"]  # without its cache
    monkeypatch.setattr(segments, "_delta_sm90_tokens", fresh)
    return two_kernels(monkeypatch) | {"segment_transition", "state_passing"}


def states_scanned(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """As with consistent=True, in segments of a chunk."""
    from slipstream.runtime.consistent import consistent_scope

    monkeypatch.setattr(segments, "MIN_SCANNED_SEGMENTS", 1)
    monkeypatch.setattr(segments, "MIN_CUT_CHUNKS", 1)
    monkeypatch.setattr(consistent_scope, "on", True)
    return set()


def one_scan(
    every: int, parts: int = 0, forward: str = "chunk_fwd", slots: int = 3
) -> Callable[..., set[str]]:
    """In parts of `every` chunks. parts: of a segment, where there are any; slots: programs whose
    memory there is."""

    def chosen(monkeypatch: pytest.MonkeyPatch) -> set[str]:
        from slipstream.kernels.linear.sm90.delta.bwd_schedule import make_schedule

        delta = backend("delta")
        cut = lambda terms: make_schedule(terms, every, parts)  # noqa: E731
        monkeypatch.setattr(delta.bwd_schedule, "choose_schedule", cut)
        monkeypatch.setattr(delta, "MAX_WORKSPACES", slots)
        ends = {"segment_transition", "chunk_dstate", "state_passing"} if parts else set()
        return {"solve_tril", forward, "chunk_bwd"} | ends

    return chosen


def scans_of_many_heads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    many_heads(monkeypatch)
    return one_scan(2, forward="fused_fwd")(monkeypatch)


def both_in_segments(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    in_segments(monkeypatch)
    return one_scan(1, 2)(monkeypatch)


PACKED, LONG = (5, 0, 200, 1), (5, 0, 200, 1, 64)
DELTA, WIDE = (220, 1, 2, 64, 128), (330, 1, 2, 64, 64)
SIMPLE: dict[str, Any] = {
    "no gates": ((128, 1, 1), 1, "", False),
    "a gate": ((150, 1, 2), 2, "resets"),
    "a gate, packed": ((290, 1, 2), LONG, "resets"),
}
WAYS = {
    "two kernels": Way(two_kernels, "delta", (150, 1, 2, 64, 128), 2, "resets"),
    "four heads of two": Way(two_kernels, "delta", (220, 2, 4, 64, 64), PACKED, "resets"),
    "packed": Way(two_kernels, "delta", (220, 1, 1, 64, 64), PACKED, "own", False),
    "many heads": Way(many_heads, "delta", (220, 1, 2, 128, 128), PACKED),
    "segments": Way(in_segments, "delta", (320, 1, 2, 64, 64), 1, ""),
    "packed segments": Way(in_segments, "delta", (330, 1, 1, 64, 64), (5, 320), "own", False),
    "states scanned": Way(states_scanned, "delta", (320, 1, 2, 64, 128), 2),
    "packed, scanned": Way(states_scanned, "delta", WIDE, (5, 0, 320), "own", False),
    "one scan": Way(one_scan(3), "delta", (130, 1, 2, 64, 128), 1, ""),
    "parts": Way(one_scan(1), "delta", (130, 1, 2, 64, 64), 2, "resets"),
    "packed parts": Way(one_scan(2), "delta", DELTA, PACKED),
    "parts of heads alone": Way(one_scan(2, slots=1), "delta", (220, 2, 2, 64, 64), PACKED),
    "many heads in parts": Way(scans_of_many_heads, "delta", (150, 1, 2, 128, 128), 3, "resets"),
    "segments in parts": Way(one_scan(1, 2), "delta", (290, 1, 2, 64, 128)),
    "segments of a batch": Way(one_scan(2, 1), "delta", (150, 2, 2, 64, 128), 2, ""),
    "packed in parts": Way(one_scan(1, 2), "delta", (330, 1, 2, 64, 128), (5, 0, 200, 65)),
    "packed, of a part": Way(one_scan(1, 1), "delta", (220, 1, 1, 64, 128), PACKED, "own", False),
    "segments both ways": Way(both_in_segments, "delta", (320, 1, 2, 64, 128)),
    **{
        f"{name} {width}": Way(by_shapes, "simple", (*size, width, width), *rest)
        for width in (128, 256)
        for name, (size, *rest) in SIMPLE.items()
    },
    "a gate, scanned": Way(states_scanned, "simple", (150, 1, 2, 128, 128), 2, "resets"),
    "packed gate, scanned": Way(states_scanned, "simple", (290, 1, 2, 128, 128), LONG),
    "gla": Way(by_shapes, "gla", (150, 1, 2, 128, 128), 1, "resets"),
    "gla packed": Way(by_shapes, "gla", (290, 1, 2, 128, 128), LONG, "mixed"),
    "gla before": Way(by_shapes, "gla", (140, 1, 1, 128, 128), 1, "mixed", True, True),
    "gla of strong gates": Way(by_shapes, "gla", (70, 1, 1, 128, 128), 1, "to 5"),
    "gla of huge gates": Way(by_shapes, "gla", (70, 1, 1, 128, 128), 1, "huge", False, True),
    "gla in segments": Way(cut_by(2 * C), "gla", (290, 1, 2, 128, 128), LONG, "resets"),
    "gla before, cut": Way(cut_by(2 * C), "gla", (140, 1, 1, 128, 128), 1, "mixed", True, True),
    "kda": Way(by_shapes, "kda", (150, 1, 2, 128, 64), 2),
    "kda packed": Way(by_shapes, "kda", (290, 1, 1, 64, 128), LONG),
    "kda fused": Way(fused_by(), "kda", (150, 1, 2, 128, 128), 2, "to 0.1"),
    "kda fused packed": Way(fused_by(), "kda", (210, 1, 1, 128, 128), (64, 5, 0, 130), "own"),
    "kda fused, bound": Way(fused_by(), "kda", (70, 1, 1, 128, 128), 1, "at the bound"),
    "kda fused, cut": Way(fused_by(C), "kda", (210, 1, 2, 128, 128), 1, "to 0.1"),
    "kda fused, decayed": Way(fused_by(C), "kda", (280, 1, 1, 128, 128), (5, 0, 130, 140)),
    "kda fused, mixed": Way(fused_by(C), "kda", (330, 1, 1, 128, 128), 1, "by blocks", False),
    "dplr": Way(by_shapes, "dplr", (150, 1, 2, 64, 64), 1, "own", False),
    "dplr packed": Way(by_shapes, "dplr", (140, 1, 1, 128, 64), PACKED[:2] + (70, 1)),
    "iplr": Way(by_shapes, "dplr", (70, 1, 1, 64, 64), 1, ""),
    "gdn2": Way(by_shapes, "gdn2", (150, 1, 2, 128, 64), 2),
    "gdn2 packed": Way(by_shapes, "gdn2", (140, 1, 2, 64, 128), PACKED[:2] + (70, 1)),
    **{
        f"{kind} of gates {gates}": Way(by_shapes, kind, (150, 1, 1, 64, 64), 1, gates)
        for kind in ("kda", "dplr", "gdn2")
        for gates in ("to 50", "resets", "huge", "to 5", "some 0", "-5")
    },
    "kda in segments": Way(cut_by(C), "kda", (290, 1, 1, 64, 128), LONG, "all kinds"),
    "dplr in segments": Way(cut_by(C), "dplr", (140, 1, 1, 128, 64), PACKED[:2] + (70, 1)),
    "kda in uneven segments": Way(cut_by(2 * C), "kda", (150, 1, 2, 128, 64), 2),
    "dplr in uneven segments": Way(cut_by(2 * C), "dplr", (150, 1, 2, 64, 64), 2, "all kinds"),
    "iplr in segments": Way(cut_by(2 * C), "dplr", (150, 1, 1, 64, 64), 2, ""),
}


def ends_of(terms: LinearInputs) -> tuple[Tensor, Tensor]:
    """Gradients of o, NaN where no sequence is, and of the final states."""
    do, dfinal = torch.randn_like(terms.v), torch.randn(*terms.state_shape, dtype=torch.float64)
    do[:, end_of(terms) :] = torch.nan
    return do, dfinal


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_launches_lead_from_inputs_to_gradients(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    terms, launch = way.inputs(), backend(way.kind)
    (do, dfinal), end = ends_of(terms), end_of(terms)
    want = wanted(terms, do, dfinal)
    if terms.initial_state is None:
        del want["initial_state"]
    named, ran = way.chosen(monkeypatch), launches.as_numpy(monkeypatch)
    o, final, *saved = launch.forward(terms, SCALE, save=True)
    for keeps in (False, True)[: 1 + bool(saved)]:
        left = {"saved": SavedWY(*saved)} if keeps else {}
        found = {"o": o, "final": final}
        if way.kind != "gla":  # whose backward is Triton's
            found |= launch.backward(terms, do, dfinal, SCALE, **left)
            assert want.keys() <= found.keys()
        for name in want.keys() & found.keys():
            x = want[name]
            got = found[name] if x.shape == found[name].shape else found[name][:, :end]
            near(got.double(), x, name, 1e-7)
        assert o[:, end:].isnan().all() and found.get("v", o)[:, end:].isnan().all()
    names = {x.removeprefix("delta_").removesuffix("_sm90_kernel") for x in ran}
    assert named <= names and (way.kind != "delta" or not named or named == names)
    assert ran.count("delta_solve_tril_sm90_kernel") == 2 * bool(saved)
    ran.clear()
    for got, x in zip(launch.forward(terms, SCALE), (o[:, :end], final), strict=True):
        near(got[:, :end] if got.shape == o.shape else got, x, "without gradients", 1e-7)
    assert "fused_fwd" not in named or ran == ["delta_fused_fwd_sm90_kernel"]


def test_programs_of_one_backward_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them at once than have memory, and as many, whose turns at a sum come in order."""
    for way in (
        Way(one_scan(2, slots=3), "delta", (220, 2, 2, 64, 64), PACKED),
        Way(one_scan(2, slots=132), "delta", DELTA, PACKED),
    ):
        with monkeypatch.context() as here:
            terms = way.inputs()
            ends = ends_of(terms)
            want = wanted(terms, *ends)
            way.chosen(here)
            launches.as_numpy(here, together="delta_chunk_bwd_sm90_kernel")
            found = backend("delta").backward(terms, *ends, SCALE)
            for name in "qkvg":
                near(found[name][:, : end_of(terms)].double(), want[name], name)


@pytest.mark.parametrize("kind", ["delta", "kda", "dplr"])
def test_numbers_of_no_chunk_are_passed_over(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terms, launch = inputs(kind, (220, 1, 1, 64, 64), PACKED), backend(kind).BACKEND
    assert terms.cu_seqlens is not None
    without, found = numbers_of_no_chunk(terms.cu_seqlens, C), []
    launches.as_numpy(monkeypatch)
    if kind == "delta":
        found = [launch.solve_tril(terms).beta_gate]
    else:
        keep = lambda terms, made: found.extend([made.scores.qb, made.strong])  # noqa: E731
        monkeypatch.setattr(launch, "dqkg", keep)
        launch.backward(terms, torch.randn_like(terms.v), None, SCALE)
        assert (found.pop()[without] == -1).all()
    assert without and never_written(found[0]) == without


BITS = [
    Way(two_kernels, "delta", (150, 1, 2, 64, 64), 2, "resets"),
    Way(many_heads, "delta", (150, 1, 2, 128, 128), 2, "resets"),
    *(Way(by_shapes, "simple", (148, 1, 1, n, n), 1, "resets") for n in (128, 256)),
    *(
        Way(by_shapes, "gla", (148, 1, 1, 128, 128), 1, gates, True, before)
        for gates in ("to 0.3", "to 5", "mixed")
        for before in (False, True)
    ),
    *(
        Way(by_shapes, kind, (148, 1, 2, 128, 64), 1, gates, False)
        for kind in ("kda", "dplr", "gdn2")
        for gates in ("weak", "to 9", "all kinds")
    ),
]
names_of_bits = pytest.mark.parametrize(
    "way", BITS, ids=lambda x: f"{x.kind} {x.size[3]} {x.gates} {x.before} {x.chosen.__name__}"
)


@names_of_bits
def test_past_keeps_its_bits(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the future's tokens and gates; chunks change from weak to strong and back."""
    terms = way.inputs()
    way.chosen(monkeypatch)
    launches.as_numpy(monkeypatch)
    for cut, strength in ((25, 90.0), (C + 20, 0.01), (2 * C + 3, 1.0)):
        other = with_other_future(terms, cut, strength)
        want, got = (backend(way.kind).forward(t, SCALE)[0] for t in (terms, other))
        assert torch.equal(got[:, :cut], want[:, :cut]), (cut, strength)
        assert not torch.equal(got[:, cut:], want[:, cut:])


NAN = {
    **{f"simple {n}": (by_shapes, "simple", (148, 1, 2, n, n), "resets") for n in (128, 256)},
    **{f"gla {n}": (by_shapes, "gla", (148, 1, 2, 128, 128), f"to {n}") for n in (0.3, 5, 50)},
    **{
        f"{kind} {n}": (by_shapes, kind, (148, 1, 2, 128, 64), f"to {n}")
        for kind in ("kda", "dplr", "gdn2")
        for n in (0.1, 5, 90)
    },
    **{f"fused {n}": (fused_by(), "kda", (148, 1, 2, 128, 128), f"to {n}") for n in (0.1, 5, 90)},
    "fused, cut": (fused_by(C), "kda", (148, 1, 2, 128, 128), "to 0.1"),
    "many heads": (many_heads, "delta", (148, 1, 2, 128, 128), "to 5"),
}


@pytest.mark.parametrize("way", NAN.values(), ids=NAN)
def test_nan_gate_reaches_later_outputs(way: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, kind, size, gates = way
    terms = inputs(kind, size, 2, gates)
    chosen(monkeypatch)
    launches.as_numpy(monkeypatch)
    monkeypatch.setattr(emulator, "INPUTS_HAVE_NAN", True)
    for token in (5, 70, 2 * C + 3):
        one = terms.of_tokens(Tensor.clone)
        assert one.g is not None
        one.g[(0, token, 0, 5)[: one.g.dim()]] = torch.nan
        o, final = backend(kind).forward(one, SCALE)
        assert o[0, token:, 0].isnan().all() and final[0, 0].isnan().any()
        assert not o[0, : token // C * C].isnan().any()
        assert not o[1].isnan().any() and not o[:, :, 1].isnan().any()


PREFIXES = {
    **{n: WAYS[n] for n in ("two kernels", "packed", "many heads", "segments")},
    **{n: WAYS[n] for n in ("a gate 128", "a gate 256", "a gate, packed 128", "gla", "gla packed")},
    **{n: WAYS[n] for n in ("packed segments", "kda", "kda packed", "dplr packed")},
}


@pytest.mark.parametrize("way", PREFIXES.values(), ids=PREFIXES)
def test_states_are_left_on_the_way(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rows of a pool for about two thirds of the places, and no other row is written."""
    terms = way.inputs()
    T, (N, HV, K, V) = terms.v.shape[1], terms.state_shape
    places = [(n, 0, T) for n in range(N)]
    if terms.cu_seqlens is not None:
        places = [(0, *x) for x in pairwise(terms.cu_seqlens.tolist())]
    rows = torch.full((N, -(-T // C)), -1, dtype=torch.int32)
    left = [(n, j) for n, (_, a, b) in enumerate(places) for j in range((b - a) // C)]
    left = left if len(left) < 3 else [x for i, x in enumerate(left) if i % 3 != 1]
    order = torch.randperm(len(left) + 2)
    for to, (n, j) in zip(order, left):
        rows[n, j] = to
    pool = torch.full((len(order), HV, V, K), torch.nan, dtype=torch.float64)
    way.chosen(monkeypatch)
    launches.as_numpy(monkeypatch)
    backend(way.kind).forward(terms, SCALE, prefix=PrefixStates(pool, rows))
    assert left
    for n, j in left:
        row, begin, _ = places[n]
        start = None if terms.initial_state is None else terms.initial_state[n : n + 1]
        prefix = terms.of_tokens(lambda x: x[row : row + 1, begin : begin + C * (j + 1)])  # noqa: B023
        _, state = linear_reference(prefix._replace(initial_state=start, cu_seqlens=None), 1.0)
        near(pool[rows[n, j]], state[0].mT)
    assert pool[[int(to) for to in order[len(left) :]]].isnan().all()


def test_sequences_that_begin_past_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments before the first sequence belong to no sequence."""
    terms = inputs("delta", (320, 1, 1, 64, 64), (0, 250))
    in_segments(monkeypatch)
    launches.as_numpy(monkeypatch)
    want = backend("delta").forward(terms, SCALE, save=True)[:2]
    cu = torch.tensor([70, 70, 320], dtype=torch.int32)
    moved = terms.of_tokens(lambda x: x.nan_to_num().roll(70, 1))._replace(cu_seqlens=cu)
    o, final = backend("delta").forward(moved, SCALE)
    near(final, want[1])
    near(o[:, 70:], want[0][:, :250])


@pytest.mark.parametrize("name", ["states scanned", "packed, scanned"])
def test_segments_after_a_scan_of_states_equal_one_scan(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, and the final states."""
    way = WAYS[name]
    terms = way.inputs()
    ran = launches.as_numpy(monkeypatch)
    want = backend("delta").forward(terms, SCALE)
    way.chosen(monkeypatch)
    got = backend("delta").forward(terms, SCALE)
    assert ran.count("delta_segment_transition_sm90_kernel") == 1
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


# how, tokens of ranks, and the call
EXCHANGES = {
    "segments": (both_in_segments, (160, 150, 80), ((390, 1, 1, 64, 128), 1, "")),
    "packed": (in_segments, (100, 140, 90), ((330, 1, 1, 64, 64), (5, 325), "own", False)),
    "whole sequences": (two_kernels, (70, 80, 70), ((220, 1, 2, 64, 64),)),
    "whole in one scan": (one_scan(2), (140, 80), ((220, 1, 1, 64, 128), (40, 180))),
}


@pytest.mark.parametrize("way", EXCHANGES.values(), ids=EXCHANGES)
def test_exchanges_of_ranks(way: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of ranks for their parts of sequences, put together, are those of one for all."""
    from tests.support.lockstep import linear_on_ranks

    chosen, lengths, call = way
    terms = inputs("delta", *call)
    do, dfinal = ends_of(terms)
    want = wanted(terms, do, dfinal)
    chosen(monkeypatch)
    ran = launches.as_numpy(monkeypatch)
    found = linear_on_ranks(terms, do, dfinal, lengths, scale=SCALE, impl="sm90")
    assert "delta_segment_transition_sm90_kernel" in ran
    if terms.initial_state is None:
        del want["initial_state"]
    for name, x in want.items():
        near(found[name].double(), x, name, 1e-6 if name in ("beta", "g") else 1e-8)  # in float32


# Tokens of one rank, of two and of three, and rows or packed sequences.
CUTS = {
    "rows": ((384,), (256, 128), (128, 0, 256), 2),
    "packed": ((430,), (168, 262), (40, 128, 262), (40, 390)),
}


@pytest.mark.parametrize("V", [64, 128], ids=["two kernels", "one"])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_bits_do_not_depend_on_the_ranks(
    cuts: tuple, V: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.lockstep import linear_on_ranks

    *lengths, batch = cuts
    terms = inputs("delta", (sum(lengths[0]), 1, 1, 64, V), batch)
    do, dfinal = ends_of(terms)
    want = wanted(terms, do, dfinal)
    ran = launches.as_numpy(monkeypatch)
    options: dict[str, Any] = {"scale": SCALE, "impl": "sm90", "segment_tokens": 128}
    whole, *others = [linear_on_ranks(terms, do, dfinal, x, **options) for x in lengths]
    assert ("delta_chunk_bwd_sm90_kernel" in ran) == (V == 128)
    for name, x in want.items():
        near(whole[name].double(), x, name, 1e-6 if name in ("beta", "g") else 1e-8)  # in float32
        assert all(torch.equal(found[name], whole[name]) for found in others), name


@pytest.mark.parametrize("tokens", [None, C])
def test_fused_sequences_do_not_meet_their_neighbours(
    tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their NaN, that is. Those past the last one are in all packed inputs here."""
    terms = WAYS["kda fused packed"].inputs()
    assert terms.cu_seqlens is not None
    fused_by(tokens)(monkeypatch)
    launches.as_numpy(monkeypatch)
    want, ends = backend("kda").forward(terms, SCALE)
    places = [*pairwise(terms.cu_seqlens.tolist())]
    for bad, here in enumerate(places):
        poisoned = terms.of_tokens(Tensor.clone)
        poisoned.of_tokens(lambda x, a=here: x[:, slice(*a)].fill_(torch.nan))
        got, final = backend("kda").forward(poisoned, SCALE)
        for n, (a, b) in enumerate(places):
            if n != bad:
                assert torch.equal(got[:, a:b], want[:, a:b]), (bad, n)
                assert torch.equal(final[n], ends[n])
