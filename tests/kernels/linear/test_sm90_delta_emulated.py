"""The delta rule's Gluon kernels as numpy, a thread for each part, against the oracle.

Sums, masks, rings, phases and segments are those of the kernels; layouts and rounding are not there
(tests/gluon_emulator/threads.py says what is).
"""

import functools
import importlib
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from tests.gluon_emulator import race_detector, threads

C, BV = 64, 16
ANEW = "slipstream.kernels.primitives.smem_scalars", "slipstream.kernels.linear.sm90."
CASES: dict[
    str, Any
] = {  # T, H, HV, K, V, batch or lengths of packed sequences, gated, initial state
    "plain": (128, 1, 1, 16, 16, 1, False, False),
    "odd": (150, 1, 2, 16, 32, 2, True, True),
    "packed": (290, 2, 4, 16, 16, (5, 0, 200, 1, 64), True, True),
    "even": (140, 2, 2, 16, 16, (5, 0, 70, 1), True, True),
    "wide": (290, 1, 2, 16, 32, (5, 0, 200, 1, 64), True, False),
    "four heads of one": (70, 1, 4, 16, 16, (5, 65), True, False),
}


class Descriptor(threads.Descriptor):
    def __init__(self, x: Tensor, width: int, rows: int, columns: int) -> None:
        super().__init__(x.view(-1, width).numpy(), (rows, columns))


class Pointer(threads.Pointer):
    dtype = SimpleNamespace(element_ty="16-bit")

    def __init__(self, x: Tensor) -> None:
        super().__init__(x.view(-1).numpy())


def _copy_out(desc: Descriptor, at: list, buffer: threads.Buffer) -> None:
    row, column = (int(x) for x in at)
    assert buffer.shape == desc.block and np.isfinite(buffer.data).all()

    def finish() -> None:
        part = desc.data[row : row + desc.block[0], column : column + desc.block[1]]
        part[...] = buffer.data[: part.shape[0], : part.shape[1]]

    threads.later(finish, buffer)


class Buffer(threads.Buffer):
    def index(self, i: Any) -> Any:
        if isinstance(i, np.ndarray) and i.ndim:
            return OfWarps(self.data[i])
        found = super().index(i)
        return Buffer(found.data) if isinstance(found, threads.Buffer) else found

    def permute(self, order: tuple[int, ...]) -> "Buffer":
        return Buffer(self.data.transpose(order))

    layout = None

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> "Buffer":
        """Of what lies in memory from here on."""
        size = int(np.prod(shape))
        flat = self.data.reshape(-1)[:size]
        if flat.size < size:
            whole = self.data.base.reshape(-1)
            first = self.data.ctypes.data - whole.ctypes.data
            flat = whole[first // whole.itemsize :][:size]
        assert np.shares_memory(flat, self.data)
        return Buffer(flat.reshape(shape))


class OfWarps(Buffer):
    """What each warp takes for the same tile."""

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Buffer:
        assert shape[0] == 1
        return Buffer(self.data.reshape(-1, *shape[1:]))


def _scan(x: Any, axis: int, add: Any, reverse: bool = False) -> Any:
    turned = np.flip(x, axis) if reverse else x
    found = np.cumsum(turned, axis)
    return threads.tensor(np.flip(found, axis) if reverse else found)


@contextmanager
def emulated() -> Any:
    """What these kernels want and those of attention don't."""
    language, barriers = threads._language(), threads._mbarrier()
    made = SimpleNamespace(get_default_for=threads._nothing)
    vars(language).update(
        bfloat16="16-bit",
        thread_barrier=threads._nothing,
        zeros_like=lambda x: threads.tensor(np.zeros_like(x)),
        reshape=lambda x, shape: threads.tensor(np.reshape(x, shape)),
        permute=lambda x, order: threads.tensor(np.transpose(x, order)),
        min=lambda x, axis: threads.tensor(np.min(x, axis)),
        associative_scan=_scan,
        split=lambda x: tuple(threads.tensor(x[..., i]) for i in range(2)),
        allocate_shared_memory=lambda *a: Buffer(threads._allocate(*a).data),
        NVMMASharedLayout=made,
        SwizzledSharedLayout=threads._nothing,
    )
    with (
        mock.patch.object(threads, "_language", return_value=language),
        mock.patch.object(threads, "_mbarrier", return_value=barriers),
        mock.patch.object(threads, "_ANEW", ANEW),
        threads.emulated(),
    ):
        import sys

        gluon: Any = sys.modules["slipstream.kernels.primitives.gluon_compat"]
        gluon.copy_out = _copy_out
        yield


@functools.cache
def kernels() -> SimpleNamespace:
    files = {  # file and kernel of each name
        "solve": ("solve_tril", "solve_tril"), "walk": ("chunk_fwd", "chunk_fwd"),
        "back": ("chunk_dstate", "chunk_dstate"), "grads": ("dqkg", "dqkg"),
        "ends": ("segment_transition", "segment_transition"),
        "ends_back": ("segment_transition", "segment_transition_bwd"),
        "wide": ("chunk_fwd_2tile", "chunk_fwd_2tile"), "fused": ("bwd_fused", "chunk_bwd"),
    }  # fmt: skip
    with emulated():
        # not from the package, which may have those that are compiled
        found = {
            name: importlib.import_module(f"slipstream.kernels.linear.sm90.delta.{file}")
            for name, (file, _) in files.items()
        }
        inverse = importlib.import_module("slipstream.kernels.linear.sm90.common.tril_inverse")
        vars(inverse)["halves"] = lambda b: (b, 0.0 * b)
        named = {
            name: getattr(x, f"delta_{files[name][1]}_sm90_kernel") for name, x in found.items()
        }
        return SimpleNamespace(**named, inverse=inverse.inverse)


def inputs(case: tuple) -> LinearInputs:
    """Past the last sequence of packed ones is NaN."""
    T, H, HV, K, V, batch, gated, state = case
    lengths: Any = batch if isinstance(batch, tuple) else None
    B: Any = 1 if lengths else batch
    N = len(lengths) if lengths else B
    torch.manual_seed(0)
    make: dict[str, Any] = {"dtype": torch.float64}
    x = torch.rand(B, T, HV, **make)
    terms = LinearInputs(
        torch.randn(B, T, H, K, **make),
        torch.nn.functional.normalize(torch.randn(B, T, H, K, **make), dim=-1),
        torch.randn(B, T, HV, V, **make),
        g=torch.where(x < 0.05, -torch.inf, -x) if gated else None,
        beta=2 * torch.rand(B, T, HV, **make),
        initial_state=torch.randn(N, HV, K, V, **make) if state else None,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int() if lengths else None,
    )
    if lengths:
        for y in (terms.q, terms.k, terms.v, terms.g, terms.beta):
            assert y is not None
            y[:, sum(lengths) :] = torch.nan
    return terms


class Run:
    def __init__(self, terms: LinearInputs, segment: int | None = None) -> None:
        self.terms, self.segment = terms, segment
        self.B, self.T, self.HV, self.V = terms.v.shape
        self.H, self.K = terms.q.shape[2:]
        self.packed = terms.cu_seqlens is not None
        self.slots = self.count(segment) if segment else terms.sequences
        self.chunks = self.count(C)
        self.r = self.empty(self.B, self.T, self.HV, C)
        self.rows = self.empty(self.chunks, self.HV, 1 + (terms.g is not None), C)
        cu = None if terms.cu_seqlens is None else Pointer(terms.cu_seqlens)
        self.sizes = (cu, 0.3, self.T, terms.sequences, self.HV, self.H, segment or self.T)
        flags = {"K": self.K, "C": C, "HAS_GATE": terms.g is not None, "PACKED": self.packed}
        self.flags = {**flags, "V": self.V, "BV": BV, "ST": 2, "SPLIT": segment is not None}
        g = None if terms.g is None else Pointer(terms.g)
        beta = terms.beta
        assert beta is not None
        self.growth = self.empty(self.chunks, self.HV, C // 16)
        r = Descriptor(self.r, self.HV * C, C, C)
        given = [Descriptor(terms.k, self.H * self.K, C, self.K), r, Pointer(self.r), g]
        given += map(Pointer, (beta, self.rows, self.growth))
        args = (*given, cu, self.T, terms.sequences, self.HV, self.H)
        threads._LOCAL.queue, threads._LOCAL.errors = [], []  # it has one part
        threads.launch(kernels().solve, self.chunks * self.HV, args, **flags, BASE=16)

    def count(self, tokens: int) -> int:
        if self.packed:
            return self.T // tokens + self.terms.sequences
        return self.B * -(-self.T // tokens)

    def empty(self, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=torch.float64)

    def call(
        self, kernel: Any, tensors: list, s_in: Any, s_out: Any, more: tuple = (), **flags: Any
    ) -> None:
        widths = {"q": self.H * self.K, "v": self.HV * self.V, "r": self.HV * C, "s": self.K}
        blocks = {"q": (C, self.K), "v": (C, BV), "r": (C, C), "s": (BV, self.K)}
        made = [x and Descriptor(x[0], widths[x[1]], *blocks[x[1]]) for x in tensors]
        out, sizes, flags, tiles = tensors[4][0], self.sizes, self.flags | flags, self.V // BV
        if kernel is kernels().wide:
            sizes, tiles = sizes[:-1], tiles // 2
            del flags["SPLIT"]
        states = [None if x is None else Pointer(x) for x in (s_in, s_out)]
        ends = {"HAS_S_IN": s_in is not None, "HAS_S_OUT": s_out is not None}
        args = (*made, Pointer(out), Pointer(self.rows), *states, *sizes, *more)
        threads.launch(kernel, tiles * self.HV * self.slots, args, **flags, **ends)

    def walk(
        self, s_in: Any, s_out: Any, keep: bool, every: int = 0, wide: bool = False
    ) -> tuple[Tensor, Tensor]:
        """o, or w where S before chunks is kept, and S before those, or before `every` chunks of
        each sequence."""
        t = self.terms
        out = self.empty(*t.v.shape)
        states = self.empty(
            self.count(C * every) if every else self.chunks, self.HV, self.V, self.K
        )
        tensors = [(t.q, "q"), (t.k, "q"), (t.v, "v"), (self.r, "r"), (out, "v")]
        tensors += [(states, "s"), (states, "s")]
        kernel, sizes = (kernels().wide if wide else kernels().walk), (every,)
        flags = {"KEEP": keep, "PARTS": every > 0}
        self.call(kernel, tensors, s_in, s_out, sizes, **flags)
        return out, states

    def wide(self, s_in: Any, s_out: Any, keep: bool, every: int = 0) -> tuple[Tensor, Tensor]:
        return self.walk(s_in, s_out, keep, every, True)

    def back(self, do: Tensor, s_in: Any, s_out: Any) -> tuple[Tensor, Tensor]:
        t = self.terms
        dv = self.empty(*t.v.shape)
        states = self.empty(self.chunks, self.HV, self.V, self.K)
        tensors = [(t.q, "q"), (t.k, "q"), (do, "v"), (self.r, "r"), (dv, "v"), (states, "s")]
        self.call(kernels().back, tensors, s_in, s_out)
        return dv, states

    def ends(self, do: Tensor | None = None, end: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """E and M of each slot, or, of do, dE; and which M count as zero."""
        t, K, V = self.terms, self.K, self.V
        blocks = {"q": (C, K), "v": (C, BV), "r": (C, C)}
        widths = {"q": self.H * K, "v": self.HV * V, "r": self.HV * C}
        given = [(t.k, "q"), (t.v, "v"), (self.r, "r")]
        if do is not None:
            given = [(t.q, "q"), (t.k, "q"), (do, "v"), (self.r, "r")]
        made = self.empty(self.slots, self.HV, K, V if do is not None else V + K)
        far = torch.full((self.slots, self.HV), -1.0, dtype=torch.float64)
        start = t.initial_state if do is None else end
        cu, scale, *rest = self.sizes
        args = [Descriptor(x, widths[n], *blocks[n]) for x, n in given]
        args += [Pointer(self.rows), Pointer(self.growth)]
        args += [None if start is None else Pointer(start), Pointer(made)]
        args += [Pointer(far), cu] if do is None else [cu, scale]
        flags = {name: x for name, x in self.flags.items() if name != "SPLIT"}
        flags |= {"BLOCKS": C // 16, "HAS_S_IN": start is not None}
        kernel = kernels().ends if do is None else kernels().ends_back
        programs = (V + K if do is None else V) // BV * self.HV * self.slots
        threads.launch(kernel, programs, (*args, *rest), **flags)
        return made, far

    def grads(
        self, do: Tensor, w: Tensor, dv: Tensor, states: Tensor, dstates: Tensor, G: int
    ) -> dict:
        """Of q, k, beta and g. G: value heads a program."""
        t, (HV, V), (H, K) = self.terms, (self.HV, self.V), (self.H, self.K)
        BK, heads = K // 2, HV // G
        made, q = {n: self.empty(self.B, self.T, heads, K) for n in "qk"}, t.q.clone()
        if heads == HV and K == V:
            made["k" if H == HV else "q"] = w  # as the launch has it
        if H == HV:
            made["q"] = q  # as where nobody wants q afterwards
        sums = {n: self.empty(self.B, self.T, HV) for n in ("beta", "g")}
        given = [Descriptor(x, H * K, C, BK) for x in (q, t.k)]
        given += [Descriptor(x, HV * V, C, V) for x in (do, w, dv)]
        given += [Descriptor(x, K, V, BK) for x in (states, dstates)]
        given += [Descriptor(x, heads * K, C, BK) for x in made.values()]
        pointers = [Pointer(x) for x in (*made.values(), self.rows, *sums.values())]
        flags = {name: self.flags[name] for name in ("K", "V", "C", "HAS_GATE", "PACKED")}
        turns = Pointer(torch.zeros(self.chunks, heads, dtype=torch.int32))
        cu, *sizes = self.sizes[:6]
        args = (*given, *pointers, cu, turns, *sizes, G)
        threads.launch(kernels().grads, self.chunks * HV, args, **flags, BK=BK, SHARED=G > 1)
        return {n: x.view(self.B, self.T, H, -1, K).sum(3) for n, x in made.items()} | sums


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want.detach(), rtol=1e-8, atol=1e-8)


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
    o, _ = run.walk(terms.initial_state, final, keep=False)
    dv, _ = run.back(do, dfinal, dinitial)
    w, states = run.walk(terms.initial_state, None, keep=True)
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


@pytest.mark.parametrize("case", [CASES["odd"], CASES["wide"]], ids=["odd", "wide"])
def test_wide_walk_equals_the_walk(case: tuple) -> None:
    terms = inputs(case)
    run, start = Run(terms), terms.initial_state
    final = torch.empty(*terms.state_shape, dtype=torch.float64)
    want = torch.empty_like(final)
    o, _ = run.walk(start, want, keep=False)
    torch.testing.assert_close(run.wide(start, final, keep=False)[0], o, equal_nan=True)
    near(final, want)
    for given in ((True,), (False, 1), (False, 2)):
        found = zip(run.wide(start, None, *given), run.walk(start, None, *given), strict=True)
        for got, seen in found:
            torch.testing.assert_close(got, seen, equal_nan=True)


@pytest.mark.parametrize("case", [CASES["odd"], CASES["packed"]], ids=["odd", "packed"])
@pytest.mark.parametrize("segment", [None, C, 3 * C], ids=["whole", "of one", "of three"])
def test_walk_leaves_states_before_every_so_many_chunks(case: tuple, segment: int | None) -> None:
    terms = inputs(case)
    whole, run = Run(terms), Run(terms, segment=segment)
    _, states = whole.walk(terms.initial_state, None, keep=True)
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
        _, marks = run.walk(met, None, False, every)
        for n, (begin, length) in enumerate(bounds):
            for i in range(-(-length // (every * C))):
                got = marks[place(n, begin, every * C) + i]
                near(got, states[place(n, begin, C) + i * every])


def test_walks_leave_states_of_no_tokens_where_they_are() -> None:
    terms = inputs(CASES["wide"])
    state = torch.randn(*terms.state_shape, dtype=torch.float64)
    do = torch.randn_like(terms.v)
    run, found = Run(terms), []
    for skip in (False, True):
        run.flags["SKIP"] = skip
        for walk in (run.walk, run.wide):
            end = state.clone()
            found += [walk(end, end, keep=False)[0], end, *walk(state, None, keep=True)]
        end = state.clone()
        found += [*run.back(do, end, end), end]
    half = len(found) // 2
    for got, want in zip(found[half:], found[:half], strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("case", [CASES["odd"], CASES["packed"]], ids=["odd", "packed"])
def test_segments_equal_whole(case: tuple) -> None:
    terms = inputs(case)
    whole, run = Run(terms), Run(terms, segment=C)
    o, _ = whole.walk(terms.initial_state, None, keep=False)
    _, states = whole.walk(terms.initial_state, None, keep=True)
    met = states.mT.nan_to_num().contiguous()  # a segment is a chunk here, so are its slots
    split, _ = run.walk(met, None, keep=False)
    torch.testing.assert_close(split, o, equal_nan=True)


@pytest.mark.parametrize("case", [CASES["odd"], CASES["packed"]], ids=["odd", "packed"])
def test_ends_lead_to_the_states_that_segments_meet(case: tuple) -> None:
    terms = inputs(case)
    do = torch.randn_like(terms.v)
    dfinal = torch.randn(*terms.state_shape, dtype=torch.float64)
    whole, run = Run(terms), Run(terms, segment=C)
    _, states = whole.walk(terms.initial_state, None, keep=True)
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
