"""The additive family's Gluon scans as numpy, a thread for each part, against the oracle.

Sums, masks, rings, phases and segments are those of the kernel; layouts and rounding are not there
(tests/gluon_emulator/threads.py says what is).
"""

import functools
import importlib
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from tests.gluon_emulator import linear as emulator
from tests.gluon_emulator import threads
from tests.gluon_emulator.prefix_states import expecting_prefix_states
from tests.support.causality import with_other_future

C, SPAN = 64, 2
WIDTHS = (128, 256)  # of K and of V; HALVES is 1 for the second
CASES: dict[str, Any] = {  # T, H, HV, batch or lengths of packed sequences, gated, initial state
    "plain": (128, 1, 1, 1, False, False),
    "odd": (150, 1, 2, 2, True, True),
    "packed": (290, 1, 2, (5, 0, 200, 1, 64), True, True),
}
SCALE = 0.3
MIN_CHUNK_GATE = -100.0
MODULES = "slipstream.kernels.linear.sm90.scalar_decay"


def _scan(x: Any, axis: int, combine: Any) -> Any:
    return threads.tensor(np.cumsum(x, axis))


def _slice(self: Any, start: int, length: int) -> Any:
    return emulator.Buffer(self.data[start : start + length])


@contextmanager
def emulated() -> Iterator[None]:
    language = threads._language()
    language.associative_scan = _scan
    with (
        mock.patch.object(threads, "_language", return_value=language),
        emulator.emulated(),
    ):
        yield


@functools.cache
def module(name: str) -> ModuleType:
    with emulated():
        for file in ("chunk_fwd", "chunk_bwd", "state_scan"):
            sys.modules.pop(f"{MODULES}.{file}", None)  # which come back after this
        return importlib.import_module(f"{MODULES}.{name}")


def kernel(name: str) -> Any:
    return getattr(module(name), f"scalar_decay_{name}_sm90_kernel")


class Run:
    """The scans of one call, whole or in segments; sums for the gate's gradient by `terms.g`."""

    def __init__(self, terms: LinearInputs, segment: int | None = None) -> None:
        self.terms, self.segment = terms, segment
        self.B, self.T, self.HV = terms.v.shape[:3]
        self.H, self.width = terms.q.shape[2:]
        wide = self.width == WIDTHS[1]
        self.packed = terms.cu_seqlens is not None
        self.slots = self.count(segment) if segment else terms.sequences
        self.spans = self.count(SPAN * C)
        self.rows = {
            name: self.empty(parts, self.HV, self.B * self.T)
            for name, parts in (("q", 4 if wide else 2), ("k", 8 if wide else 2))
        }
        self.z = self.empty(4 if wide else 2, self.spans, self.HV)
        self.anchors = self.empty(self.spans, self.HV, self.width, self.width)

    def count(self, tokens: int) -> int:
        if self.packed:
            return self.T // tokens + self.terms.sequences
        return self.B * -(-self.T // tokens)

    def empty(self, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=torch.float64)

    def scan(
        self,
        names: tuple[Tensor, Tensor, Tensor],
        s_in: Tensor | None,
        s_out: Tensor | None,
        transposed: bool = False,
        qk: str = "",
        reverse: bool = False,
    ) -> Tensor:
        t, width = self.terms, self.width
        r, w, x = names
        y = self.empty(self.B, self.T, self.HV, width)
        tiles = [(r, width), (w, width), (x, 64), (y, 64), (getattr(t, qk), 64) if qk else None]
        wide = width == WIDTHS[1]
        assert wide or not reverse
        flags: dict[str, Any] = {"D": width, "X": width, "TRANSPOSED": transposed}
        flags |= {"HALVES": 1 if wide else 2, "REVERSE": reverse}
        heads = (r.shape[2], x.shape[2])
        scales = (1 / SCALE, SCALE) if reverse else (1.0, 1.0)
        sums = (None, None, None)
        if qk:
            sums = (self.rows[qk], self.z if reverse else None, self.anchors)
        self.launch("chunk_fwd", tiles, [y], [s_in, s_out, *sums], scales, heads, flags)
        return y

    def back(self, do: Tensor, s_in: Tensor, s_out: Tensor) -> tuple[Tensor, Tensor]:
        t = self.terms
        if self.width == WIDTHS[1]:
            qk = "k" if t.g is not None else ""
            dk = self.scan((t.v, do, t.q), s_in, None, transposed=True, qk=qk, reverse=True)
            return dk, self.scan((t.k, t.q, do), s_in, s_out, reverse=True)
        dk, dv = (self.empty(self.B, self.T, self.HV, 128) for _ in range(2))
        tiles = [(t.q, 128), (t.k, 128), (t.v, 64), (do, 64), (dk, 128), (dv, 64)]
        sums = (None, None, None) if t.g is None else (self.rows["k"], self.z, self.anchors)
        rest, scales = [s_in, s_out, *sums], (1 / SCALE, SCALE)
        self.launch("chunk_bwd", tiles, [dk, dv], rest, scales, (self.H,), {"K": 128, "V": 128})
        return dk, dv

    def launch(
        self,
        name: str,
        tiles: list,
        outs: list[Tensor],
        rest: list,
        scales: tuple[float, float],
        heads: tuple[int, ...],
        flags: dict[str, Any],
    ) -> None:
        t, (s_in, s_out, rows, *_) = self.terms, rest
        made = [p and emulator.Descriptor(p[0], p[0].shape[2] * self.width, C, p[1]) for p in tiles]
        given = [*outs, t.g, *rest, t.cu_seqlens]
        pointers = [None if p is None else emulator.Pointer(p.contiguous()) for p in given]
        sizes = (self.T, t.sequences, self.HV, *heads, self.B * self.T, self.segment or self.T)
        strides = (0, 0, 0) if t.g is None else t.g.stride()
        flags |= {"C": C, "ST": 2, "ANCHOR_INTERVAL": SPAN, "HAS_GATE": t.g is not None}
        flags |= {"HAS_DG": rows is not None, "HAS_S_IN": s_in is not None}
        flags |= {"HAS_S_OUT": s_out is not None, "SPLIT": self.segment is not None}
        args = (*made, *pointers, SCALE, *scales, *sizes, self.spans, *strides)
        programs = self.HV * self.slots * (self.width // 64 if flags.get("HALVES") == 1 else 1)
        threads.launch(kernel(name), programs, args, PACKED=self.packed, **flags)

    def gradients(self, do: Tensor, dfinal: Tensor, dinitial: Tensor) -> dict[str, Tensor]:
        _, k, v = self.terms[:3]
        start, gated = self.terms.initial_state, self.terms.g is not None
        dq = self.scan((do, v, k), start, None, transposed=True, qk="q" if gated else "")
        dk, dv = self.back(do, dfinal, dinitial)
        H = self.H
        grads = {"q": dq, "k": dk, "v": dv, "initial_state": dinitial}
        for name in "qk":
            grads[name] = grads[name].view(self.B, self.T, H, -1, self.width).sum(3)
        if gated:
            grads["g"] = self.gate_gradient()
        return grads

    def gate_gradient(self) -> Tensor:
        """As scalar_decay_dg_kernel, where it takes nothing to cross a chunk of strong gates."""
        cu = self.terms.cu_seqlens
        each = [(n * self.T, self.T) for n in range(self.B)]
        if cu is not None:
            each = [(int(a), int(b - a)) for a, b in itertools.pairwise(cu)]
        k_rows, later = (x.sum(0) for x in self.rows["k"].chunk(2))
        rows = self.rows["q"].sum(0) - k_rows
        assert self.terms.g is not None
        g = self.terms.g.clamp(min=-128).permute(2, 0, 1).flatten(1)
        dg, size = torch.full_like(rows, torch.nan), SPAN * C
        for i, (begin, length) in enumerate(each):
            first = begin // size + i if self.packed else i * -(-self.T // size)
            for t in range((length - 1) // C * C, -1, -C):
                at = slice(begin + t, begin + min(length, t + C))
                if t % size == size - C or t + C >= length:
                    z = self.z[:, first + t // size].sum(0)
                z = torch.where(g[:, at].sum(1) < MIN_CHUNK_GATE, later[:, at].sum(1), z)
                dg[:, at] = rows[:, at].flip(1).cumsum(1).flip(1) + z[:, None]
                z = dg[:, begin + t]
        return dg.view(self.HV, self.B, self.T).permute(1, 2, 0)


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
    start = torch.zeros_like(dfinal) if terms.initial_state is None else terms.initial_state
    live: dict[str, Any] = {
        name: x[:, :end].clone().requires_grad_()
        for name, x in terms._asdict().items()
        if x is not None and name in ("q", "k", "v", "g")
    }
    live["initial_state"] = start.clone().requires_grad_()
    want_o, want_final = linear_reference(LinearInputs(**live, cu_seqlens=terms.cu_seqlens), SCALE)
    loss = (want_o * do[:, :end]).sum() + (want_final * dfinal).sum()
    want = dict(zip(live, torch.autograd.grad(loss, list(live.values()))))
    near(o[:, :end], want_o)
    near(final, want_final)
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
    monkeypatch.setattr(threads, "_WAIT", 0.5)
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
            "chunk_fwd: mbarrier.wait(barriers.full.index(s), (i // ST) & 1)",
            *SHARED_ALONE,
        ]
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("case", [CASES["odd"], CASES["packed"]], ids=["odd", "packed"])
def test_states_are_left_on_the_way(case: tuple, width: int) -> None:
    terms = inputs(case, width)
    with expecting_prefix_states(terms):
        Run(terms).scan((terms.q, terms.k, terms.v), terms.initial_state, None)
