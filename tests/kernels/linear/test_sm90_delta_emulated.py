"""The delta rule's Gluon kernels as numpy, a thread for each part, against the oracle.

Sums, masks, rings, phases and segments are those of the kernels; layouts and rounding are not there
(tests/gluon_emulator/threads.py says what is).
"""

from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from tests.gluon_emulator import race_detector, threads
from tests.gluon_emulator.prefix_states import expecting_prefix_states
from tests.support.causality import with_other_future
from tests.support.sm90_delta import CASES, C, Run, inputs, kernels, near


@pytest.mark.parametrize("views", [True, False], ids=["views", "tiles"])
def test_inverse_is_of_what_is_below_the_diagonal(views: bool) -> None:
    """Gives the diagonal back too; no kernel reads what is above it.

    views: of several tiles where one is, as up to Triton 3.7; else each warp finds its own tile.
    """
    a = torch.randn(C, C, dtype=torch.float64) / 4
    junk = torch.where(torch.rand(C, C) < 0.5, torch.inf, torch.nan)
    given = torch.where(torch.ones(C, C).triu(1) > 0, junk, a)
    threads._LOCAL.part = race_detector.Part(race_detector.Program(), "the program")
    given_by_triton = {"LARGER_VIEWS": views, "warp_of_four": lambda: np.arange(4)}
    used = kernels().inverse
    with np.errstate(all="ignore"), mock.patch.dict(used.__globals__, given_by_triton):
        got, own = used(threads.tensor(given.numpy()))
    want = torch.linalg.inv(torch.eye(C, dtype=torch.float64) + a.tril(-1))
    near(torch.tensor(np.asarray(got)), want)
    near(torch.tensor(np.asarray(own)).flatten(), a.diagonal())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_delta_kernels_match_reference(case: tuple) -> None:
    terms = inputs(case)
    end = int(terms.cu_seqlens[-1]) if terms.cu_seqlens is not None else case[0]
    do, dfinal = torch.randn_like(terms.v), torch.randn(*terms.state_shape, dtype=torch.float64)
    run = Run(terms)
    final, dinitial = torch.empty_like(dfinal), torch.empty_like(dfinal)
    o, _ = run.scan(terms.initial_state, final, keep=False)
    dv, _ = run.back(do, dfinal, dinitial)
    w, states = run.scan(terms.initial_state, None, keep=True)
    assert not w[:, :end].isnan().any()
    _, dstates = run.back(do, dfinal, None)
    live: dict[str, Any] = {
        name: x[:, :end].clone().requires_grad_() if name in ("q", "k", "v", "g", "beta") else x
        for name, x in terms._asdict().items()
        if x is not None
    }
    start = torch.zeros_like(dfinal) if terms.initial_state is None else terms.initial_state
    live["initial_state"] = start.clone().requires_grad_()
    want_o, want_final = linear_reference(LinearInputs(**live), 0.3)
    loss = (want_o * do[:, :end]).sum() + (want_final * dfinal).sum()
    names = [n for n in ("v", "initial_state", "q", "k", "beta", "g") if n in live]
    want = dict(zip(names, torch.autograd.grad(loss, [live[n] for n in names]), strict=True))
    want_dv, want_dinitial = want["v"], want["initial_state"]
    states, dstates = states.nan_to_num(), dstates.nan_to_num()
    for G in {run.HV // run.H, 1}:  # with 1 dq is where w was
        found = run.grads(do, w.clone(), dv, states, dstates, G)
        for name in names[2:]:
            near(found[name][:, :end], want[name])
    near(o[:, :end], want_o)
    near(final, want_final)
    near(dv[:, :end], want_dv)
    near(dinitial, want_dinitial)
    assert o[:, end:].isnan().all() and dv[:, end:].isnan().all()
    near(states[0].mT, start[0])  # the first sequence's first chunk


def test_past_keeps_its_bits() -> None:
    terms = inputs(CASES["odd"])
    for cut, strength in ((5, 50.0), (C + 20, 0.01), (2 * C + 3, 1.0)):
        runs = [Run(t) for t in (terms, with_other_future(terms, cut, strength))]
        for way in ("scan", "wide"):
            want, got = (getattr(x, way)(terms.initial_state, None, False)[0] for x in runs)
            assert torch.equal(got[:, :cut], want[:, :cut]), (way, cut, strength)
            assert not torch.equal(got[:, cut:], want[:, cut:])


@pytest.mark.parametrize("case", [CASES["odd"], CASES["wide"]], ids=["odd", "wide"])
def test_wide_scan_equals_the_scan(case: tuple) -> None:
    terms = inputs(case)
    run, start = Run(terms), terms.initial_state
    final = torch.empty(*terms.state_shape, dtype=torch.float64)
    want = torch.empty_like(final)
    o, _ = run.scan(start, want, keep=False)
    torch.testing.assert_close(run.wide(start, final, keep=False)[0], o, equal_nan=True)
    near(final, want)
    for given in ((True,), (False, 1), (False, 2)):
        found = zip(run.wide(start, None, *given), run.scan(start, None, *given), strict=True)
        for got, seen in found:
            torch.testing.assert_close(got, seen, equal_nan=True)


@pytest.mark.parametrize("case", [CASES["odd"], CASES["packed"]], ids=["odd", "packed"])
@pytest.mark.parametrize("segment", [None, C, 3 * C], ids=["whole", "of one", "of three"])
def test_scan_leaves_states_before_every_so_many_chunks(case: tuple, segment: int | None) -> None:
    terms = inputs(case)
    whole, run = Run(terms), Run(terms, segment=segment)
    _, states = whole.scan(terms.initial_state, None, keep=True)
    met = terms.initial_state
    bounds = [(n * terms.v.shape[1], terms.v.shape[1]) for n in range(terms.v.shape[0])]
    if terms.cu_seqlens is not None:
        bounds = [(a, b - a) for a, b in pairwise(terms.cu_seqlens.tolist())]
    place = (lambda n, begin, tokens: begin // tokens + n) if whole.packed else None
    place = place or (lambda n, begin, tokens: n * -(-run.T // tokens))
    if segment:
        met = run.empty(run.slots, *terms.state_shape[1:])
        for n, (begin, length) in enumerate(bounds):
            for i in range(-(-length // segment)):
                at = place(n, begin, C) + i * (segment // C)
                met[place(n, begin, segment) + i] = states[at].mT
    for every in (1, 2):
        _, marks = run.scan(met, None, False, every)
        for n, (begin, length) in enumerate(bounds):
            for i in range(-(-length // (every * C))):
                got = marks[place(n, begin, every * C) + i]
                near(got, states[place(n, begin, C) + i * every])


@pytest.mark.parametrize("case", [CASES["odd"], CASES["packed"]], ids=["odd", "packed"])
def test_segments_equal_whole(case: tuple) -> None:
    terms = inputs(case)
    whole, run = Run(terms), Run(terms, segment=C)
    o, _ = whole.scan(terms.initial_state, None, keep=False)
    _, states = whole.scan(terms.initial_state, None, keep=True)
    met = states.mT.nan_to_num().contiguous()  # a segment is a chunk here, so are its slots
    split, _ = run.scan(met, None, keep=False)
    torch.testing.assert_close(split, o, equal_nan=True)


@pytest.mark.parametrize("case", [CASES["odd"], CASES["packed"]], ids=["odd", "packed"])
def test_ends_lead_to_the_states_that_segments_meet(case: tuple) -> None:
    terms = inputs(case)
    do = torch.randn_like(terms.v)
    dfinal = torch.randn(*terms.state_shape, dtype=torch.float64)
    whole, run = Run(terms), Run(terms, segment=C)
    _, states = whole.scan(terms.initial_state, None, keep=True)
    _, dstates = whole.back(do, dfinal, None)
    made, far = run.ends()
    back, _ = run.ends(do, dfinal)
    (B, T), V = terms.v.shape[:2], run.V
    bounds = [(n * -(-T // C), T) for n in range(B)]
    if terms.cu_seqlens is not None:
        cu = terms.cu_seqlens.tolist()
        bounds = [(b // C + n, e - b) for n, (b, e) in enumerate(pairwise(cu))]
    for first, length in bounds:
        slots = range(first, first + -(-length // C))  # a segment is a chunk here
        for slot in slots[1:]:
            M, E = made[slot - 1, :, :, V:], made[slot - 1, :, :, :V]
            S = states[slot - 1].mT
            cut = (far[slot - 1] > 0)[:, None, None] & (slot - 1 >= first)
            near(torch.where(cut, E, M @ S + E), states[slot].mT)
        for slot in slots[:-1]:
            M, E = made[slot + 1, :, :, V:], back[slot + 1]
            cut = (far[slot + 1] > 0)[:, None, None]
            near(torch.where(cut, E, M.mT @ dstates[slot + 1].mT + E), dstates[slot].mT)


@pytest.mark.parametrize("case", [CASES["odd"], CASES["wide"]], ids=["odd", "packed"])
@pytest.mark.parametrize("way", ["scan", "wide", "segments"])
def test_states_are_left_on_the_way(case: tuple, way: str) -> None:
    terms = inputs(case)
    whole, run, start = Run(terms), Run(terms, segment=2 * C), terms.initial_state
    if way == "segments":
        _, states = whole.scan(start, None, keep=True)
        start = run.empty(run.slots, *terms.state_shape[1:])
        for n in range(terms.sequences):
            begin, length = n * run.T, run.T
            if terms.cu_seqlens is not None:
                begin, length = int(terms.cu_seqlens[n]), int(terms.cu_seqlens.diff()[n])
            for i in range(-(-length // (2 * C))):
                places = [n * -(-run.T // tokens) for tokens in (C, 2 * C)]
                if run.packed:
                    places = [begin // tokens + n for tokens in (C, 2 * C)]
                start[places[1] + i] = states[places[0] + 2 * i].mT
    with expecting_prefix_states(terms):
        if way == "segments":
            run.scan(start, None, keep=False)
        else:
            getattr(whole, way)(start, None, keep=False)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("segment", [C, 2 * C], ids=["of one", "of two"])
def test_segments_after_a_scan_of_states_equal_one_scan(case: tuple, segment: int) -> None:
    """Bit for bit, and the final states."""
    terms = inputs(case)
    whole, run = Run(terms), Run(terms, segment=segment)
    final = torch.empty(*terms.state_shape, dtype=torch.float64)
    want = torch.empty_like(final)
    o, _ = whole.scan(terms.initial_state, want, keep=False)
    starts = run.starts(final).nan_to_num()  # of segments that no sequence has
    assert torch.equal(final, want)
    got, _ = run.scan(starts, None, keep=False)
    torch.testing.assert_close(got, o, rtol=0, atol=0, equal_nan=True)
