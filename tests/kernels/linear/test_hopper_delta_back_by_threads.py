"""The delta rule's backward in one walk as numpy, against the oracle.

As test_hopper_by_threads.py has the other kernels.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.reference import linear_reference
from slipstream.kernels.linear.terms import Terms
from tests.kernels.linear.test_delta_windows import wanted as windows
from tests.kernels.linear.test_hopper_by_threads import (
    CASES,
    C,
    Descriptor,
    Pointer,
    Run,
    cuts_and_begin,
    inputs,
    kernels,
    near,
)
from tests.kernels.softmax import gluon_by_threads as threads


def fused(
    run: Run, do: Tensor, w: Tensor, states: Tensor, ends: tuple, G: int, window: Any = None
) -> dict[str, Tensor]:
    """Gradients of q, k, v, beta and g, those of v where w was; ends: s_in and s_out."""
    t, (HV, V), (H, K) = run.terms, (run.HV, run.V), (run.H, run.K)
    heads = HV // G
    made = {n: run.empty(run.B, run.T, heads, K) for n in "qk"}
    sums = {n: run.empty(run.B, run.T, HV) for n in ("beta", "g")}
    given = [Descriptor(x, H * K, C, K) for x in (t.q.clone(), t.k)]
    given += [Descriptor(do, HV * V, C, V), Descriptor(run.r, HV * C, C, C)]
    given += [Descriptor(w, HV * V, C, V), Descriptor(states, K, V, K)]
    given += [Descriptor(x, heads * K, C, K) for x in made.values()]
    pointers = [Pointer(x) for x in (*made.values(), w, run.rows, *sums.values())]
    pointers += [None if x is None else Pointer(x) for x in ends]
    flags = {name: run.flags[name] for name in ("K", "V", "C", "HAS_GATE", "PACKED", "ST")}
    flags |= {"HAS_S_IN": ends[0] is not None, "HAS_S_OUT": ends[1] is not None}
    turns = Pointer(torch.zeros(run.chunks, heads, dtype=torch.int32))
    cu, *sizes = run.sizes[:6]
    cuts, begin = cuts_and_begin(window, run.T)
    args = (*given, *pointers, cu, *cuts, turns, *sizes, G, *begin)
    threads.launch(
        kernels().fused, HV * run.slots, args, **flags, BK=K // 2, WARPS=4, REGISTERS=0, FEW=0,
        SHARED=G > 1, SKIP=run.flags.get("SKIP", False), CUT=run.packed and window is not None,
    )  # fmt: skip
    return {n: x.view(run.B, run.T, H, -1, K).sum(3) for n, x in made.items()} | sums | {"v": w}


def wanted(terms: Terms, do: Tensor, dfinal: Tensor, end: int) -> dict[str, Tensor]:
    live: dict[str, Any] = {
        name: x[:, :end].clone().requires_grad_() if name in ("q", "k", "v", "g", "beta") else x
        for name, x in terms._asdict().items()
        if x is not None
    }
    start = torch.zeros_like(dfinal) if terms.initial_state is None else terms.initial_state
    live["initial_state"] = start.clone().requires_grad_()
    o, final = linear_reference(Terms(**live), 0.3)
    loss = (o * do[:, :end]).sum() + (final * dfinal).sum()
    names = [n for n in ("v", "initial_state", "q", "k", "beta", "g") if n in live]
    return dict(zip(names, torch.autograd.grad(loss, [live[n] for n in names]), strict=True))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_delta_backward_in_one_walk_matches_reference(case: tuple) -> None:
    terms = inputs(case)
    end = int(terms.cu_seqlens[-1]) if terms.cu_seqlens is not None else case[0]
    do, dfinal = torch.randn_like(terms.v), torch.randn(*terms.state_shape, dtype=torch.float64)
    if terms.cu_seqlens is not None:
        do[:, end:] = torch.nan
    run = Run(terms)
    want = wanted(terms, do, dfinal, end)
    w, states = run.walk(terms.initial_state, None, keep=True)
    for G in {run.HV // run.H, 1}:
        dinitial = torch.empty_like(dfinal)
        found = fused(run, do, w.clone(), states, (dfinal, dinitial), G)
        near(dinitial, want["initial_state"])
        for name in want:
            if name != "initial_state":
                near(found[name][:, :end], want[name])
        assert found["v"][:, end:].isnan().all()


def test_spans_of_tokens_equal_the_whole() -> None:
    terms = inputs((290, 1, 2, 16, 32, 2, True, True))
    run, heads = Run(terms), 2
    do, dfinal = torch.randn_like(terms.v), torch.randn(*terms.state_shape, dtype=torch.float64)
    want = wanted(terms, do, dfinal, 290)
    final, mark = torch.empty_like(dfinal), torch.empty_like(dfinal)
    o, _ = run.wide(terms.initial_state, mark, False, (0, 128))
    run.wide(mark, final, False, (128, 192), o)
    near(o, run.walk(terms.initial_state, None, keep=False)[0])
    state, found = dfinal.clone(), []
    for start, window in ((mark, (128, 192)), (terms.initial_state, (0, 128))):
        w, states = run.wide(start, None, True, window)
        found.append(fused(run, do, w, states, (state, state), heads, window))
    near(state, want["initial_state"])
    for name in ("q", "k", "v", "beta", "g"):
        near(torch.cat([found[1][name][:, :128], found[0][name][:, 128:]], 1), want[name])


# sequences that go at once, spans
CUTS = [(5, 3), (5, 5), (2, 3), (1, 2)]
PACKED = {
    # no tokens, a few, many; the last tokens are nobody's
    "uneven": (640, 1, 2, 16, 32, (5, 0, 500, 1, 64), True, True),
    "none at the ends": (420, 1, 1, 16, 32, (0, 130, 64, 200, 0), True, True),
    "from zero": (300, 2, 2, 16, 32, (65, 0, 63, 129, 10), True, False),
}


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("case", PACKED.values(), ids=PACKED)
def test_windows_of_packed_sequences_equal_the_whole(case: tuple, cut: tuple[int, int]) -> None:
    """Through memory that is NaN where nobody has written."""
    terms, (rows, spans) = inputs(case), cut
    lengths, end = case[5], sum(case[5])
    run, G = Run(terms), terms.v.shape[2] // terms.q.shape[2]
    do, dfinal = torch.randn_like(terms.v), torch.randn(*terms.state_shape, dtype=torch.float64)
    do[:, end:] = torch.nan
    want = wanted(terms, do, dfinal, end)
    room = max(-(-(case[0] // C + len(lengths)) // spans), rows)
    table = windows(lengths, rows, room, spans)
    borders = 1 if rows == len(lengths) else 2
    marks = run.empty(spans - 1, rows, *terms.state_shape[1:])
    goes_on = run.empty(borders, rows, *terms.state_shape[1:])
    final, dinitial = torch.full_like(dfinal, torch.nan), torch.full_like(dfinal, torch.nan)
    o, _ = run.wide(terms.initial_state, final, False, marks=(table, marks))
    expected = torch.empty_like(final)
    near(o[:, :end], run.walk(terms.initial_state, expected, keep=False)[0][:, :end])
    near(final, expected)
    run.chunks, chunks = room, run.chunks
    w, found = run.empty(*terms.v.shape), []
    for i in reversed(range(spans)):
        before = marks[max(i - 1, 0)]
        w, states = run.wide(terms.initial_state, None, True, (table[i], before), w)
        at = table[i], goes_on[(i + 1) % borders], goes_on[i % borders]
        run.chunks = chunks
        found.append(fused(run, do, w, states, (dfinal, dinitial), G, at))
        run.chunks = room
    near(dinitial, want["initial_state"])
    near(w[:, :end], want["v"])
    assert w[:, end:].isnan().all() and o[:, end:].isnan().all()
    for name in [n for n in ("q", "k", "beta", "g") if n in want]:
        parts = torch.stack([x[name][:, :end] for x in found])
        assert ((~parts.isnan()).sum(0) == 1).all()  # each token in one span
        near(parts.nansum(0), want[name])
