"""The Gluon kernels of per-channel decay, and of free a and b, as numpy against the oracle.

Sums, masks, indices and barriers are those of the kernels; layouts and rounding are not there
(test_sm90_delta_emulated.py).
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.modes import memory
from slipstream.kernels.linear.reference import linear_reference
from slipstream.kernels.linear.segments import split_into_segments
from tests.gluon_emulator import linear as emulator
from tests.gluon_emulator import threads
from tests.gluon_emulator.prefix_states import expecting_prefix_states
from tests.support import sm90_dplr
from tests.support.causality import with_other_future
from tests.support.sm90_dplr import CASES, C, inputs
from tests.support.sm90_dplr import kernels_in_float64 as kernels


def prepared(terms: LinearInputs, keep: bool) -> dict[str, Any]:
    return sm90_dplr.prepared(terms, keep, kernels())


class Scan:
    """The kernels on what is prepared. segment: tokens of one."""

    def __init__(
        self, terms: LinearInputs, made: dict[str, Any], segment: int | None = None
    ) -> None:
        self.terms, self.made = terms, made
        T, self.HV, V = terms.v.shape[1:]
        self.K, self.N = terms.q.shape[-1], terms.sequences
        split = split_into_segments(terms, segment)
        self.slots = self.N if split is None else split.count
        self.columns, self.delta = (self.HV * V, 64), terms.transition == "delta"
        self.states = (made["q"].shape[0], self.HV, V)
        self.sizes: tuple[int, ...] = (T, self.N, self.HV, segment or T)
        self.ends = (self.slots, self.HV, self.K, V)
        self.flags = {"K": self.K, "V": V, "C": C, "ST": 2, "SPLIT": segment is not None}
        self.flags |= {"HAS_GATE": terms.g is not None, "PACKED": terms.cu_seqlens is not None}

    def empty(self, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=torch.float64)

    def prepared(self, *names: str) -> list[Any]:
        widths = {"qb": C, "qk": C, "r": C}
        widths = {name: (self.made[name], *2 * [widths.get(name, self.K)]) for name in names}
        return [None if x[0] is None else x for x in widths.values()]

    def launch(self, kernel: Any, tiles: list, pointers: tuple, many: int = 1, **flags: Any):
        descriptors = [x and emulator.Descriptor(x[0], x[1], C, x[2]) for x in tiles]
        pointers = (*pointers, self.terms.cu_seqlens)
        given = [None if x is None else emulator.Pointer(x) for x in pointers]
        sizes = list(self.sizes)
        if kernel is kernels().scan:
            sizes.insert(3, self.HV if self.o is None else self.o.stride(1) // self.ends[3])
        args = (*descriptors, *given, *sizes)
        threads.launch(kernel, many * self.HV * self.slots, args, **self.flags, **flags)

    def forward(self, start: Tensor | None, o: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """o: memory for it."""
        o = self.empty(*self.terms.v.shape) if o is None else o
        final = self.empty(*self.ends)
        v = None if self.delta else (self.terms.v, *self.columns)
        tiles = self.prepared("q", "w", "b", "k", "qb", "qk")
        self._forward([*tiles, v, (o, *self.columns), None, None], "o", o, start, final)
        return o, final

    def keep(self, start: Tensor | None) -> tuple[Tensor, Tensor]:
        x, states = self.empty(*self.states, C), self.empty(*self.states, self.K)
        v = None if self.delta else (self.terms.v, *self.columns)
        tiles = [None, *self.prepared("w", "b", "k"), None, None, v, None, (x, C, C)]
        self._forward([*tiles, (states, self.K, self.K)], "states", None, start, None)
        return x, states

    def segments(self) -> tuple[Tensor, Tensor, Tensor]:
        """E, M, and where that counts as zero and is not written."""
        E, M = self.empty(*self.ends), self.empty(*self.ends[:3], self.K)
        m_is_zero = torch.full(self.ends[:2], -1, dtype=torch.int32)
        v = None if self.delta else (self.terms.v, *self.columns)
        tiles = [None, *self.prepared("w", "b", "k"), None, None, v, None, None, None]
        self._forward(tiles, "ends", None, None, E, M, m_is_zero)
        empty = M.isnan().all((2, 3))
        assert torch.equal(m_is_zero, empty.int())
        return E, M.masked_fill(empty[..., None, None], 0.0), m_is_zero

    def _forward(
        self,
        tiles: list,
        make: str,
        o: Tensor | None,
        start: Tensor | None,
        final: Tensor | None,
        m: Tensor | None = None,
        m_is_zero: Tensor | None = None,
    ) -> None:
        self.o = o
        pointers = (o, self.made["u"], self.made["total"], start, final, m, m_is_zero)
        pointers += (None, None) if m is None else (self.made["w"], self.made["b"])
        flags = {"DELTA": self.delta, "OUTPUT": make}
        flags |= {"HAS_S_IN": start is not None, "HAS_S_OUT": final is not None}
        many = 1 if m is None else 1 + -(-self.K // self.ends[3])
        self.launch(kernels().scan, tiles, pointers, many, **flags)

    def back(self, do: Tensor, dfinal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, states = self.empty(*self.states, C), self.empty(*self.states, self.K)
        dstart = self.empty(*self.ends)
        tiles = [(do, *self.columns), *self.prepared("q", "w", "b", "qb", "r"), (y, C, C)]
        tiles.append((states, self.K, self.K))
        pointers = (self.made["total"], dfinal, dstart)
        flags = {"HAS_S_IN": True, "HAS_S_OUT": True, "TRANSITION_ONLY": False}
        self.launch(kernels().back, tiles, pointers, **flags)
        return y, states, dstart

    def segments_back(self, do: Tensor) -> Tensor:
        """dE"""
        dE = self.empty(*self.ends)
        tiles = [(do, *self.columns), *self.prepared("q", "w", "b", "qb"), None, None, None]
        pointers = (self.made["total"], None, dE)
        flags = {"HAS_S_IN": False, "HAS_S_OUT": True, "TRANSITION_ONLY": True}
        self.launch(kernels().back, tiles, pointers, **flags)
        return dE


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want.detach(), rtol=1e-7, atol=1e-7)


def places_of(terms: LinearInputs) -> list[tuple[int, int, int]]:
    """Each sequence's first token, the one after its last, and its first chunk."""
    T, ends = terms.q.shape[1], terms.cu_seqlens
    if ends is None:
        return [(n * T, (n + 1) * T, n * -(-T // C)) for n in range(terms.q.shape[0])]
    return [(x, y, x // C + n) for n, (x, y) in enumerate(itertools.pairwise(ends.tolist()))]


def check(terms: LinearInputs) -> dict[str, Any]:
    made = prepared(terms, keep=True)
    scan = Scan(terms, made)
    do, dfinal = torch.randn_like(terms.v), torch.randn(*scan.ends, dtype=torch.float64)
    made |= {"do": do, "dfinal": dfinal}
    made["o"], made["final"] = scan.forward(terms.initial_state)
    made["x"], made["states"] = scan.keep(terms.initial_state)
    made["y"], made["dstates"], made["dstart"] = scan.back(do, dfinal)
    for n, place in enumerate(places_of(terms)):
        if place[0] < place[1]:
            check_sequence(terms, made, n, *place)
    return made


def check_sequence(
    terms: LinearInputs, made: dict[str, Any], n: int, begin: int, end: int, first: int
):
    one = {
        name: x.flatten(0, 1)[None, begin:end]
        for name, x in terms._asdict().items()
        if x is not None and name not in ("cu_seqlens", "initial_state")
    }
    starts = terms.initial_state
    start = torch.zeros_like(made["dfinal"][:1]) if starts is None else starts[n : n + 1].clone()
    start.requires_grad_()
    o, final = linear_reference(LinearInputs(**one, initial_state=start), 0.3)
    near(made["o"].flatten(0, 1)[begin:end], o[0])
    near(made["final"][n], final[0])
    loss = (o[0] * made["do"].flatten(0, 1)[begin:end]).sum() + (final * made["dfinal"][n]).sum()
    (dstart,) = torch.autograd.grad(loss, start)
    near(made["dstart"][n], dstart[0])
    near(made["states"][first], start[0].mT)
    last = first + (end - begin - 1) // C
    got = made["states"][last].mT
    got = got * made["total"][last][..., None] if terms.g is not None else got
    got = got + made["b"][last].mT @ made["x"][last].mT
    if terms.transition == "dplr":
        v = terms.v.flatten(0, 1)[begin + (last - first) * C : end].transpose(0, 1)
        got = got + made["k"][last][:, : v.shape[1]].mT @ v
    near(got, final[0])
    assert not made["y"][first : last + 1].isnan().any()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_prepared_chunks_scan_to_reference(case: tuple) -> None:
    check(inputs(case))


@pytest.mark.parametrize("case", ["kda", "dplr_packed", "gdn2"])
def test_strong_chunks_scan_to_reference(case: str) -> None:
    for gates in (
        lambda x: -50 * x,
        lambda x: torch.where(x < 0.05, -torch.inf, -x),
        lambda x: torch.where(x < 0.02, -1e4, -0.1 * x),
        lambda x: -5 * x,
        lambda x: torch.where(x < 0.3, 0.0, -9 * x),
        lambda x: 0 * x - 5,
    ):
        made = check(inputs(CASES[case], gates))
        assert made["strong"].nan_to_num().max() > 0


@pytest.mark.parametrize("case", ["kda_packed", "dplr", "gdn2"])
def test_views_of_heads_equal_those_heads_alone(case: str) -> None:
    """Read where they are, and o written there, beside other heads."""
    T, _, _, *rest = CASES[case]
    whole = inputs((T, 2, 4, *rest), all_kinds)
    _, part = memory._cut(whole, whole.dims, ("H", "HV"), 2)
    alone = part.of_tokens(Tensor.contiguous)
    state = None if part.initial_state is None else part.initial_state.contiguous()
    assert (part.row_heads, alone.row_heads) == (4, 2)
    want = Scan(alone, prepared(alone, keep=False)).forward(state)
    rows = torch.full((*part.v.shape[:2], 4, part.v.shape[3]), torch.nan, dtype=torch.float64)
    got = Scan(part, prepared(part, keep=False)).forward(state, rows[:, :, 2:])
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert rows[:, :, :2].isnan().all()


@pytest.mark.parametrize("case", ["kda", "dplr", "gdn2"])
def test_past_keeps_its_bits(case: str) -> None:
    """Whatever the future's tokens and gates; chunks change from weak to strong and back."""
    _, H, HV, K, V, _, *of = CASES[case]
    size = (96, H, HV, K, V, 1, *of)

    def weak(x: Tensor) -> Tensor:
        return -0.1 * x

    def strong(x: Tensor) -> Tensor:
        return -9 * x

    for gates, cut, strength in ((weak, 25, 90.0), (strong, 21, 0.01), (all_kinds, 70, 1.0)):
        terms = inputs(size, gates)
        pair = (terms, with_other_future(terms, cut, strength))
        want, got = (Scan(t, prepared(t, keep=False)).forward(None)[0] for t in pair)
        assert torch.equal(got[:, :cut], want[:, :cut]), (gates.__name__, strength)
        assert not torch.equal(got[:, cut:], want[:, cut:])


@pytest.mark.parametrize("strength", [0.1, 5.0, 90.0])
@pytest.mark.parametrize("case", ["kda", "dplr", "gdn2"])
def test_nan_gate_reaches_later_outputs(
    case: str, strength: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulator, "INPUTS_HAVE_NAN", True)
    terms = inputs(CASES[case], lambda x: -strength * x)
    assert terms.g is not None
    for token in (70, 120):
        g = terms.g.clone()
        g[0, token, 0, 5] = torch.nan
        one = terms._replace(g=g)
        o, final = Scan(one, prepared(one, keep=False)).forward(None)
        assert o[0, token:, 0].isnan().all() and final[0, 0].isnan().any()
        assert (
            not o[0, :C].isnan().any() and not o[1:].isnan().any() and not o[:, :, 1].isnan().any()
        )


def all_kinds(x: Tensor) -> Tensor:
    """Gates of 0, weak and strong ones, and -inf."""
    x = torch.where(x < 0.8, -x, -50 * x)
    return torch.where(x < -49, -torch.inf, torch.where(x > -0.2, 0.0, x))


@pytest.mark.parametrize("case", ["kda_packed", "dplr", "iplr", "kda gates", "dplr_packed gates"])
def test_segments_lead_from_state_to_state(case: str) -> None:
    """E and M from the state before a chunk to the next, and the scans from these to the same."""
    name, *gates = case.split()
    terms = inputs(CASES[name], all_kinds if gates else None)
    made = check(terms)
    scan = Scan(terms, made, segment=C)
    E, M, _ = scan.segments()
    dE = scan.segments_back(made["do"])
    # a segment is a chunk here, and so are their numbers
    states, dstates = (made[name].nan_to_num().mT.contiguous() for name in ("states", "dstates"))
    for n, (begin, end, first) in enumerate(places_of(terms)):
        last = first + -(-(end - begin) // C) - 1
        for at in range(first, last + 1):
            after = made["final"][n] if at == last else states[at + 1]
            near(M[at] @ states[at] + E[at], after)
            before = made["dstart"][n] if at == first else dstates[at - 1]
            near(M[at].mT @ dstates[at] + dE[at], before)
    check_from(scan, made, states, dstates)


def check_from(scan: Scan, made: dict[str, Any], states: Tensor, dstates: Tensor) -> None:
    """Segments scanned from these states, and back from these gradients, make what was made."""
    for got, name in ((scan.forward(states)[0], "o"), (scan.keep(states)[0], "x")):
        torch.testing.assert_close(got, made[name], equal_nan=True)
    torch.testing.assert_close(scan.back(made["do"], dstates)[0], made["y"], equal_nan=True)


@pytest.mark.parametrize("case", ["kda", "dplr", "iplr"])
def test_rows_of_uneven_segments_equal_whole(case: str) -> None:
    """Two rows, each in a segment of two chunks and one of a few tokens."""
    _, *heads, _, of_delta, gated = CASES[case]
    terms = inputs((150, *heads, 2, of_delta, gated))
    made = check(terms)
    scan = Scan(terms, made, segment=2 * C)
    (E, M, _), dE = scan.segments(), scan.segments_back(made["do"])
    states, dstates = torch.empty_like(E), torch.empty_like(E)
    for n in range(2):
        state, dstate = torch.zeros_like(E[0]), made["dfinal"][n]
        for at in (2 * n, 2 * n + 1):
            states[at], state = state, M[at] @ state + E[at]
        for at in (2 * n + 1, 2 * n):
            dstates[at], dstate = dstate, M[at].mT @ dstate + dE[at]
        near(state, made["final"][n])
        near(dstate, made["dstart"][n])
    check_from(scan, made, states, dstates)


# Whether a transition counts as zero, for gates of
DECAYED = {"-5 to 0": True, "-0.3": True, "-0.1": False, "swapped": False}


def test_transition_counts_as_zero_where_its_norm_does() -> None:
    """Each head has gates of its own. Those of "swapped" add up to 2^-230 a chunk, but every key,
    erased twice, moves the state to the channel that is about to keep it."""
    T, HV, K = 384, len(DECAYED), 64
    make: dict[str, Any] = {"dtype": torch.float64}
    k = torch.nn.functional.normalize(torch.randn(1, T, HV, K, **make), dim=-1)
    k[:, :, 3], k[:, :, 3, 0], k[:, :, 3, 1] = 0.0, 0.5**0.5, -(0.5**0.5)
    g = torch.empty(1, T, HV, K, **make)
    g[:, :, 0], g[:, :, 1], g[:, :, 2], g[:, :, 3] = -5 * torch.rand(T, K, **make), -0.3, -0.1, -5.0
    g[:, ::2, 3, 0] = g[:, 1::2, 3, 1] = 0.0
    beta = torch.rand(1, T, HV, **make)
    beta[:, :, 3] = 2.0
    q, v = (torch.randn(1, T, HV, K, **make) for _ in range(2))
    start = torch.randn(1, HV, K, K, **make)
    terms = LinearInputs(q, k, v, g=g, beta=beta, initial_state=start)
    scan = Scan(terms, prepared(terms, False), segment=3 * C)
    E, M, m_is_zero = scan.segments()
    assert m_is_zero.tolist() == 2 * [[int(x) for x in DECAYED.values()]]
    state = M[0] @ start[0] + E[0]
    half = terms.of_tokens(lambda x: x[:, : 3 * C])
    _, want = linear_reference(half, 0.3)
    torch.testing.assert_close(state[None], want, rtol=0.0, atol=2.0**-30)
    assert 1 - 1e-9 < M[0, 3, 0, 0] < 1 + 1e-9  # all that this channel held is there
    o, _ = scan.forward(torch.stack((start[0], state)))
    torch.testing.assert_close(o, linear_reference(terms, 0.3)[0], rtol=0.0, atol=2.0**-30)


@pytest.mark.parametrize("case", ["kda", "kda_packed", "dplr_packed"])
def test_states_are_left_on_the_way(case: str) -> None:
    terms = inputs(CASES[case])
    scan = Scan(terms, prepared(terms, keep=False))
    with expecting_prefix_states(terms):
        scan.forward(terms.initial_state)
