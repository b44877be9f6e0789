"""The additive family's Gluon scans as numpy, a thread for each part, against the oracle.

Sums, masks, rings, phases and segments are those of the kernel; layouts and rounding are not there
(tests/gluon_emulator/threads.py says what is).
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from tests.gluon_emulator import linear as emulator
from tests.gluon_emulator import threads
from tests.gluon_emulator.prefix_states import expecting_prefix_states
from tests.support.causality import with_other_future
from tests.support.sm90_delta import wanted
from tests.support.sm90_scalar_decay import SPAN, WIDTHS, C, Run, emulated, kernel, module

CASES: dict[str, Any] = {  # T, H, HV, batch or lengths of packed sequences, gated, initial state
    "plain": (128, 1, 1, 1, False, False),
    "odd": (150, 1, 2, 2, True, True),
    "packed": (290, 1, 2, (5, 0, 200, 1, 64), True, True),
}


def inputs(case: tuple, width: int = WIDTHS[0]) -> LinearInputs:
    """Past the last sequence of packed ones is NaN."""
    T, H, HV, batch, gated, state = case
    lengths: Any = batch if isinstance(batch, tuple) else None
    B: Any = 1 if lengths else batch
    N = len(lengths) if lengths else B
    torch.manual_seed(0)
    make: dict[str, Any] = {"dtype": torch.float64}
    x = torch.rand(B, T, HV, **make)
    terms = LinearInputs(
        torch.randn(B, T, H, width, **make),
        torch.nn.functional.normalize(torch.randn(B, T, H, width, **make), dim=-1),
        torch.randn(B, T, HV, width, **make),
        g=torch.where(x < 0.05, -torch.inf, -x) if gated else None,
        initial_state=torch.randn(N, HV, width, width, **make) if state else None,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int() if lengths else None,
    )
    if lengths:
        for y in (terms.q, terms.k, terms.v, terms.g):
            assert y is not None
            y[:, sum(lengths) :] = torch.nan
    return terms


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want.detach(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_additive_scans_match_reference(case: tuple, width: int) -> None:
    terms = inputs(case, width)
    end = int(terms.cu_seqlens[-1]) if terms.cu_seqlens is not None else case[0]
    do, dfinal = torch.randn_like(terms.v), torch.randn(*terms.state_shape, dtype=torch.float64)
    run = Run(terms)
    final, dinitial = torch.empty_like(dfinal), torch.empty_like(dfinal)
    o = run.scan(terms[:3], terms.initial_state, final)
    got = run.gradients(do, dfinal, dinitial)
    want = wanted(terms, do, dfinal, end)
    near(o[:, :end], want.pop("o"))
    near(final, want.pop("final"))
    near(got.pop("initial_state"), want.pop("initial_state"))
    for name, x in want.items():
        near(got[name][:, :end], x)
        assert got[name][:, end:].isnan().all()
    assert o[:, end:].isnan().all()


@pytest.mark.parametrize("width", WIDTHS)
def test_nan_gate_reaches_later_outputs(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator, "INPUTS_HAVE_NAN", True)
    terms = inputs((2 * C + 20, 1, 2, 2, True, True), width)
    assert terms.g is not None
    for token in (5, C + 20, 2 * C + 3):
        g = terms.g.clone()
        g[0, token, 0] = torch.nan
        one = terms._replace(g=g)
        final = torch.empty(*terms.state_shape, dtype=torch.float64)
        o = Run(one).scan(one[:3], one.initial_state, final)
        assert o[0, token:, 0].isnan().all() and final[0, 0].isnan().all()
        assert not o[0, : token // C * C].isnan().any()
        assert not o[1].isnan().any() and not o[:, :, 1].isnan().any()


@pytest.mark.parametrize("width", WIDTHS)
def test_past_keeps_its_bits(width: int) -> None:
    terms = inputs((2 * C + 20, 1, 1, 1, True, True), width)
    for cut, strength in ((5, 50.0), (C + 20, 0.01), (2 * C + 3, 1.0)):
        pair = (terms, with_other_future(terms, cut, strength))
        want, got = (Run(t).scan(t[:3], t.initial_state, None) for t in pair)
        assert torch.equal(got[:, :cut], want[:, :cut]), (cut, strength)
        assert not torch.equal(got[:, cut:], want[:, cut:])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("case", [CASES["odd"], CASES["packed"]], ids=["odd", "packed"])
def test_segments_equal_whole(case: tuple, width: int) -> None:
    """A segment that is met by the state that the whole scan has there."""
    terms = inputs(case, width)
    segment = SPAN * C
    whole, run = Run(terms), Run(terms, segment=segment)
    do = torch.randn_like(terms.v)
    dq = whole.scan((do, terms.v, terms.k), terms.initial_state, None, transposed=True, qk="q")
    met = torch.zeros(run.slots, run.HV, width, width, dtype=torch.float64)
    met[1:] = whole.anchors[: run.slots - 1].nan_to_num()
    begins = range(0, terms.sequences * run.T, run.T)
    if terms.cu_seqlens is not None:
        begins = terms.cu_seqlens[:-1].tolist()
    for n, begin in enumerate(begins):
        first = begin // segment + n if run.packed else n * -(-run.T // segment)
        assert terms.initial_state is not None
        met[first] = terms.initial_state[n]
    split = run.scan((do, terms.v, terms.k), met, None, transposed=True, qk="q")
    torch.testing.assert_close(split, dq, equal_nan=True)
    torch.testing.assert_close(run.rows["q"], whole.rows["q"], equal_nan=True)


def scanned_states(run: Run, BD: int) -> tuple[Tensor, Tensor]:
    """Those before segments, zero where there is none, and the final ones, by state_scan.py."""
    t, width, segment = run.terms, run.width, run.segment
    assert segment is not None
    states = torch.zeros(run.slots, run.HV, width, width, dtype=torch.float64)
    final = run.empty(*t.state_shape)
    tiles = (t.k, BD), (t.v, 64)
    made = [emulator.Descriptor(x, x.shape[2] * width, C, columns) for x, columns in tiles]
    given = t.g, t.initial_state, final, states, t.cu_seqlens
    pointers = [None if p is None else emulator.Pointer(p.contiguous()) for p in given]
    sizes = run.T, t.sequences, run.HV, run.H, run.HV, segment
    strides = (0, 0, 0) if t.g is None else t.g.stride()
    flags: dict[str, Any] = {"D": width, "X": width, "BD": BD, "C": C, "ST": 3}
    flags |= {"HAS_GATE": t.g is not None, "HAS_S_IN": t.initial_state is not None}
    flags |= {"HAS_S_OUT": True, "PACKED": run.packed}
    programs = width // 64 * (width // BD) * run.HV * t.sequences
    threads.launch(kernel("state_scan"), programs, (*made, *pointers, *sizes, *strides), **flags)
    return states, final


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_segments_from_scanned_states_equal_whole(case: tuple) -> None:
    terms = inputs(case)
    whole, run = Run(terms), Run(terms, segment=C)
    want_final = torch.empty(terms.state_shape, dtype=torch.float64)
    want = whole.scan(terms[:3], terms.initial_state, want_final)
    states, final = scanned_states(run, 64)
    torch.testing.assert_close(final, want_final, rtol=1e-10, atol=1e-10)
    got = run.scan(terms[:3], states, None)
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-10, atol=1e-10)


SHARED_ALONE = [
    "chunk_fwd: mbarrier.wait(barriers.s_empty.index(0), (i & 1) ^ 1)",
    "chunk_fwd: fence_async_shared()",
]


def test_every_wait_of_the_wide_scan_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those that only a shared S has, and two: that scores are free is said by the stage,
    of which there are as many, and that a stage is full by its scores."""
    wide = module("chunk_fwd")
    terms = inputs((150, 1, 1, 1, True, True), WIDTHS[1])
    do, end = torch.randn_like(terms.v), torch.randn(*terms.state_shape, dtype=torch.float64)
    unnoticed = []
    for line, text in emulator.without(wide):
        planted = dict(vars(wide))
        with emulated():
            exec(compile(text, str(wide.__file__), "exec"), planted)
        found = planted["scalar_decay_chunk_fwd_sm90_kernel"]
        monkeypatch.setattr(wide, "scalar_decay_chunk_fwd_sm90_kernel", found)
        run = Run(terms)
        try:
            run.scan(terms[:3], terms.initial_state, torch.empty_like(end))
            run.gradients(do, end, torch.empty_like(end))
        except (AssertionError, TimeoutError):
            continue
        unnoticed.append(line)
    assert sorted(unnoticed) == sorted(
        [
            "chunk_fwd: mbarrier.wait(a_empty.index(a), ((i // 2) & 1) ^ 1)",
            "chunk_fwd: mbarrier.wait(barriers.full.index(s), (i // c.ST) & 1)",
            *SHARED_ALONE,
        ]
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("case", [CASES["odd"], CASES["packed"]], ids=["odd", "packed"])
def test_states_are_left_on_the_way(case: tuple, width: int) -> None:
    terms = inputs(case, width)
    with expecting_prefix_states(terms):
        Run(terms).scan((terms.q, terms.k, terms.v), terms.initial_state, None)
