"""The Gluon scan with a decay per channel as numpy, a thread for each part, against the oracle.

Sums, masks, rings, phases and segments are those of the kernel; layouts and rounding are not there
(tests/gluon_emulator/threads.py says what is).
"""

import functools
import importlib
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from slipstream.kernels.linear.segments import Segments, split_into_segments
from tests.gluon_emulator import linear as emulator
from tests.gluon_emulator import threads
from tests.gluon_emulator.prefix_states import expecting_prefix_states
from tests.support import sm90_vector_decay
from tests.support.causality import with_other_future
from tests.support.sm90_vector_decay import SCALE, C, K, V, inputs

SPAN = 2
MODULES = "slipstream.kernels.linear.sm90.vector_decay."
CASES: dict[str, Any] = {  # T, H, HV, batch or lengths of packed sequences, gates, u, initial state
    "weak": (128, 1, 1, 1, "weak", False, False),
    "odd": (150, 1, 2, 1, "reset", False, True),
    "packed": (290, 1, 2, (5, 0, 200, 1, 64), "mixed", False, True),
    "before": (140, 1, 1, 1, "mixed", True, True),
    "strong": (70, 1, 1, 1, "strong", False, True),
    "huge": (70, 1, 1, 1, "huge", True, False),
}


@functools.cache
def kernel(name: str) -> Any:
    with emulator.emulated():
        module = importlib.import_module(f"{MODULES}{name}")
    return getattr(module, f"vector_decay_{name.replace('chunk_dqk', 'dqk')}_sm90_kernel")


def scan(t: LinearInputs, *args: Any, **options: Any) -> Tensor:
    return sm90_vector_decay.scan(kernel("chunk_fwd"), t, *args, **options)


def segment_transition(t: LinearInputs, segments: Segments) -> tuple[Tensor, Tensor]:
    """E and total."""
    HV = t.v.shape[2]
    E = torch.full((segments.count, HV, K, V), torch.nan, dtype=torch.float64)
    total = torch.full((segments.count, HV, K), torch.nan, dtype=torch.float64)
    y = scan(t, t.v, None, E, segments=segments, total=total)
    assert y.isnan().all()
    return E, total


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want.detach(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_channel_scan_matches_reference(case: tuple) -> None:
    terms = inputs(case)
    end = int(terms.cu_seqlens[-1]) if terms.cu_seqlens is not None else case[0]
    do, dfinal = torch.randn_like(terms.v), torch.randn(*terms.state_shape, dtype=torch.float64)
    final, dinitial = torch.empty_like(dfinal), torch.empty_like(dfinal)
    o = scan(terms, terms.v, terms.initial_state, final)
    dv = scan(terms, do, dfinal, dinitial, reverse=True)
    start = torch.zeros_like(dfinal) if terms.initial_state is None else terms.initial_state
    live = terms._replace(v=terms.v[:, :end].clone().requires_grad_())
    live = live._replace(initial_state=start.clone().requires_grad_())
    live = live._replace(**{n: getattr(terms, n)[:, :end] for n in ("q", "k", "g")})
    want, want_final = linear_reference(live, SCALE)
    loss = (want * do[:, :end]).sum() + (want_final * dfinal).sum()
    leaves: Any = (live.v, live.initial_state)
    want_dv, want_start = torch.autograd.grad(loss, leaves)
    near(o[:, :end], want)
    near(final, want_final)
    near(dv[:, :end], want_dv)
    near(dinitial, want_start)
    assert o[:, end:].isnan().all() and dv[:, end:].isnan().all()


@pytest.mark.parametrize("case", ["odd", "packed", "before", "huge"])
def test_segments_match_reference(case: str) -> None:
    """Segments have two chunks; the last of a sequence is shorter."""
    terms = inputs(CASES[case])
    segments = split_into_segments(terms, 2 * C)
    assert segments is not None
    E, total = segment_transition(terms, segments)
    cu, T = terms.cu_seqlens, terms.q.shape[1]
    ends = [0, T] if cu is None else cu.tolist()
    states, finals = torch.zeros_like(E), torch.zeros(*terms.state_shape, dtype=torch.float64)
    for n, (begin, end) in enumerate(itertools.pairwise(ends)):
        state = finals[n] if terms.initial_state is None else terms.initial_state[n]
        first = begin // segments.tokens + n if cu is not None else 0
        for at in range(first, first - (begin - end) // segments.tokens):
            states[at], state = state, total[at][..., None] * state + E[at]
        finals[n] = state
    o = scan(terms, terms.v, states, None, segments=segments)
    of_tokens = terms.of_tokens(lambda x: x[:, : ends[-1]])
    want, want_final = linear_reference(of_tokens, SCALE)
    near(o[:, : ends[-1]], want)
    near(finals, want_final)
    assert o[:, ends[-1] :].isnan().all()


@pytest.mark.parametrize("before", [False, True])
def test_past_keeps_its_bits(before: bool) -> None:
    """Whatever the future's tokens and gates; the chunk of `cut` changes from weak to strong."""
    for kind, cut, strength in (("weak", 25, 20.0), ("strong", 40, 0.01), ("mixed", 70, 1.0)):
        terms = inputs((96, 1, 1, 1, kind, before, True))
        pair = (terms, with_other_future(terms, cut, strength))
        final = torch.empty(*terms.state_shape, dtype=torch.float64)
        want, got = (scan(t, t.v, t.initial_state, final) for t in pair)
        assert torch.equal(got[:, :cut], want[:, :cut]), (kind, strength)
        assert not torch.equal(got[:, cut:], want[:, cut:])


@pytest.mark.parametrize("kind", ["weak", "strong", "mixed"])
def test_nan_gate_reaches_later_outputs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator, "INPUTS_HAVE_NAN", True)
    terms = inputs((96, 1, 2, 2, kind, False, True))
    assert terms.g is not None
    for token in (25, 40, 70):
        g = terms.g.clone()
        g[0, token, 0, 5] = torch.nan
        final = torch.empty(*terms.state_shape, dtype=torch.float64)
        o = scan(terms._replace(g=g), terms.v, terms.initial_state, final)
        assert o[0, token:, 0].isnan().all() and final[0, 0].isnan().any()
        assert not o[0, : token // C * C].isnan().any()
        assert not o[1].isnan().any() and not o[:, :, 1].isnan().any()


def edges(t: LinearInputs, do: Tensor, s_in: Tensor | None, sums: dict, reverse: bool) -> Tensor:
    _, T, HV, _ = do.shape
    y = torch.full((1, T, HV, K), torch.nan, dtype=torch.float64)
    tiles = [(t.q, K), (t.k, K), (t.v, V), (do, V), (t.g, K), (y, 64)]
    made = [emulator.Descriptor(a, a.shape[2] * a.shape[3], C, n) for a, n in tiles]
    given = [y, s_in, *sums.values(), t.cu_seqlens]
    pointers = [None if p is None else emulator.Pointer(p.contiguous()) for p in given]
    sizes = (T, t.sequences, HV, t.q.shape[2])
    flags = {"K": K, "V": V, "C": C, "ST": 2, "ANCHOR_INTERVAL": SPAN, "LOST": 0.0, "BOUND": 60.0}
    flags |= {"REVERSE": reverse, "BEFORE": t.u is not None}
    flags |= {"HAS_S_IN": s_in is not None, "PACKED": t.cu_seqlens is not None}
    threads.launch(kernel("chunk_dqk"), HV * t.sequences, (*made, *pointers, 1.0, *sizes), **flags)
    return y


def chunks(t: LinearInputs) -> list[tuple[int, int, int, int, int]]:
    """Sequence, first token, past the last, slot of the chunk and of its span, without batches."""
    ends = [0, t.q.shape[1]] if t.cu_seqlens is None else t.cu_seqlens.tolist()
    found = []
    for n, (a, b) in enumerate(itertools.pairwise(ends)):
        for i, begin in enumerate(range(a, b, C)):
            span = a // (SPAN * C) + n + i // SPAN
            found.append((n, begin, min(begin + C, b), a // C + n + i, span))
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_edges_match_the_states(case: tuple) -> None:
    terms = inputs(case)
    T, H, HV = case[:3]
    do, last = torch.randn_like(terms.v), torch.randn(*terms.state_shape, dtype=torch.float64)
    full = torch.full
    wide: dict[str, Any] = {"dtype": torch.float64}
    count = T // C + 1 + terms.sequences
    sums = {n: full((count, HV, K), torch.nan, **wide) for n in ("sums", "z")}
    sums["anchors"] = full((count, HV, K, V), torch.nan, **wide)
    sums["decay"] = full((count, HV, K), torch.nan, **wide)
    dqs = edges(terms, do, terms.initial_state, sums, False)[0]
    dke = edges(terms, do, last, sums, True)[0]
    assert terms.g is not None
    for h in range(HV):
        q, k = (x[0, :, h // (HV // H)] for x in (terms.q, terms.k))
        v, d, g = terms.v[0, :, h], do[0, :, h], terms.g[0, :, h]
        states: dict[int, Tensor] = {}
        start = terms.initial_state
        b_s: dict[int, Tensor] = {
            n: torch.zeros(K, V, **wide) if start is None else start[n, h]
            for n in range(terms.sequences)
        }
        order = chunks(terms)
        for n, a, b, slot, _ in order:
            states[slot] = b_s[n]
            near(dqs[a:b, h], d[a:b] @ b_s[n].T)
            after = torch.stack([g[t + 1 : b].sum(0) for t in range(a, b)])
            decay = g[a:b].sum(0).exp()
            near(sums["decay"][slot, h], decay)
            b_s[n] = decay[:, None] * b_s[n] + (k[a:b] * after.exp()).T @ v[a:b]
        b_s = {n: last[n, h] for n in range(terms.sequences)}
        for n, a, b, slot, _ in reversed(order):
            near(dke[a:b, h], v[a:b] @ b_s[n].T)
            decay = g[a:b].sum(0).exp()
            until = torch.stack([g[a : t + (terms.u is None)].sum(0) for t in range(a, b)])
            near(sums["z"][slot, h], (decay[:, None] * states[slot] * b_s[n]).sum(1))
            b_s[n] = decay[:, None] * b_s[n] + (q[a:b] * until.exp()).T @ d[a:b]


@pytest.mark.parametrize("case", ["odd", "packed"])
def test_states_are_left_on_the_way(case: str) -> None:
    terms = inputs(CASES[case])
    with expecting_prefix_states(terms):
        scan(terms, terms.v, terms.initial_state, None)


def products_of_scores(gate: float) -> int:
    """Of a chunk, all of whose gates are that."""
    terms = inputs((64, 1, 1, 1, "weak", False, False))
    terms = terms._replace(g=torch.full((1, 64, 1, K), gate, dtype=torch.float64))
    of_scores = kernel("chunk_fwd").__globals__["score_partition"].__globals__
    count = mock.Mock(side_effect=of_scores["warpgroup_mma"])
    with mock.patch.dict(of_scores, warpgroup_mma=count):
        scan(terms, terms.v, None, None)
    return count.call_count


def test_strong_blocks_go_by_levels_below_the_bound() -> None:
    """16 tokens that decay by no more than e^-120 are one product, in a strong chunk too."""
    weak, at_once, *others = map(products_of_scores, (-0.1, -5.0, -7.4, -7.6))
    assert weak < at_once
    assert others == [at_once, at_once + 4 * (K // 64) * 2]
