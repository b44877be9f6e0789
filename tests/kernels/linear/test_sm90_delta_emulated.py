"""The delta rule's Gluon kernels as numpy, a thread for each part, against the oracle.

Sums, masks, rings, phases and segments are those of the kernels; layouts and rounding are not there
(tests/gluon_emulator/threads.py says what is). Segments, parts and the wide scan are launched in
test_sm90_delta_launches_emulated.py.
"""

from unittest import mock

import numpy as np
import pytest
import torch

from tests.gluon_emulator import race_detector, threads
from tests.gluon_emulator.prefix_states import expecting_prefix_states
from tests.support.causality import with_other_future
from tests.support.sm90_delta import CASES, C, Run, fused, inputs, kernels, near, wanted


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
    want = wanted(terms, do, dfinal, end)
    states, dstates = states.nan_to_num(), dstates.nan_to_num()
    for G in {run.HV // run.H, 1}:  # with 1 dq is where w was
        found = run.grads(do, w.clone(), dv, states, dstates, G)
        for name in {"q", "k", "beta", "g"} & want.keys():
            near(found[name][:, :end], want[name])
    near(o[:, :end], want["o"])
    near(final, want["final"])
    near(dv[:, :end], want["v"])
    near(dinitial, want["initial_state"])
    assert o[:, end:].isnan().all() and dv[:, end:].isnan().all()
    start = torch.zeros_like(dfinal) if terms.initial_state is None else terms.initial_state
    near(states[0].mT, start[0])  # the first sequence's first chunk


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.sample(which=lambda case, every: every == 2 or case == CASES["packed"])
def test_delta_backward_in_one_scan_matches_reference(case: tuple, every: int) -> None:
    """Through memory that is NaN where nobody has written."""
    terms = inputs((*case[:3], C, *case[4:]))  # with K of C at least, as the kernel has it
    end = int(terms.cu_seqlens[-1]) if terms.cu_seqlens is not None else case[0]
    do, dfinal = torch.randn_like(terms.v), torch.randn(*terms.state_shape, dtype=torch.float64)
    if terms.cu_seqlens is not None:
        do[:, end:] = torch.nan
    run = Run(terms)
    want = wanted(terms, do, dfinal, end)
    _, marks = run.scan(terms.initial_state, None, False, every)
    programs = run.HV * run.slots
    for G, slots in {(run.HV // run.H, 1), (1, min(3, programs)), (1, programs)}:
        dinitial = torch.full_like(dfinal, torch.nan)
        found = fused(run, do, marks, (dfinal, dinitial), G, every, slots)
        near(dinitial, want["initial_state"])
        for name in want.keys() - {"initial_state", "o", "final"}:
            near(found[name][:, :end], want[name])
        assert found["v"][:, end:].isnan().all()


def test_past_keeps_its_bits() -> None:
    terms = inputs(CASES["odd"])
    for cut, strength in ((5, 50.0), (C + 20, 0.01), (2 * C + 3, 1.0)):
        runs = [Run(t) for t in (terms, with_other_future(terms, cut, strength))]
        for way in ("scan", "wide"):
            want, got = (getattr(x, way)(terms.initial_state, None, False)[0] for x in runs)
            assert torch.equal(got[:, :cut], want[:, :cut]), (way, cut, strength)
            assert not torch.equal(got[:, cut:], want[:, cut:])


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
