"""The gradients' Gluon kernel of per-channel decay as numpy, a thread for each part.

What the scans leave is computed here, in float64, and the gradients have to be those of the oracle.
As test_sm90_delta_emulated.py: layouts, rounding, and what shares a buffer are not there.
"""

import functools
import importlib
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from tests.gluon_emulator import linear as emulator
from tests.gluon_emulator import threads

C, SCALE = 64, 0.3
PACKAGE = "slipstream.kernels.linear.sm90.dplr"
CASES = {  # kind, T, H, HV, K, V, batch or lengths of packed sequences
    "kda": ("kda", 150, 1, 2, 16, 32, 2),
    "dplr": ("dplr", 150, 1, 2, 16, 32, 2),
    "kda packed": ("kda", 290, 2, 4, 32, 16, (5, 0, 200, 1, 64)),
    "dplr packed": ("dplr", 290, 1, 1, 32, 16, (5, 0, 200, 1, 64)),
    "gdn2": ("gdn2", 150, 1, 2, 16, 32, 2),
    "gdn2 packed": ("gdn2", 290, 2, 4, 32, 16, (5, 0, 200, 1, 64)),
    "dplr at 128": ("dplr", 80, 1, 1, 128, 16, 1),
}


class Buffer(emulator.Buffer):
    def _part(self, data: np.ndarray) -> emulator.Buffer:
        return Buffer(data)

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> emulator.Buffer:
        """Memory of its own, if it has another shape."""
        if tuple(shape) == self.shape:
            return self
        return Buffer(threads._allocate(dtype, shape, layout).data)


def assembly(text: str, constraints: str, given: list, **options: Any) -> Any:
    return 1 / given[0] if text.startswith("rcp") else threads.tensor(2.0 ** given[0])


@functools.cache
def kernels() -> SimpleNamespace:
    with emulator.emulated():
        gluon: Any = sys.modules["slipstream.kernels.primitives.gluon_compat"]
        gluon.gl.inline_asm_elementwise = assembly
        gluon.gl.allocate_shared_memory = lambda *a: Buffer(threads._allocate(*a).data)
        whole: Any = importlib.import_module(f"{PACKAGE}.dqkg")
        levels: Any = importlib.import_module(f"{PACKAGE}.intra_safe_bwd")
        parts: Any = importlib.import_module(f"{PACKAGE}.dqkg_device")
        scores: Any = importlib.import_module(f"{PACKAGE}.scores")
        for module in (whole, levels, parts):
            module.halves = lambda b: (b, 0.0 * b)
            module.range = lambda *ends: map(threads.tensor, range(*map(int, ends)))
        return SimpleNamespace(
            whole=whole.dplr_dqkg_sm90_kernel,
            levels=levels.dplr_intra_safe_bwd_sm90_kernel,
            scores=scores.dplr_scores_sm90_kernel,
        )


def inputs(case: tuple, strongest: float = 0.5) -> LinearInputs:
    """Past the last sequence of packed ones is NaN."""
    kind, T, H, HV, K, V, batch = case
    packed, free, by_channel = isinstance(batch, tuple), kind == "dplr", kind == "gdn2"
    B: Any = 1 if packed else batch
    torch.manual_seed(0)
    make: dict[str, Any] = {"dtype": torch.float64}
    a, k = (torch.nn.functional.normalize(torch.randn(B, T, H, K, **make), dim=-1) for _ in "ak")
    terms = LinearInputs(
        torch.randn(B, T, H, K, **make),
        k,
        torch.randn(B, T, HV, V, **make),
        g=-strongest * torch.rand(B, T, HV, K, **make),
        beta=None if free or by_channel else 2 * torch.rand(B, T, HV, **make),
        erase=2 * torch.rand(B, T, HV, K, **make) if by_channel else None,
        write=torch.rand(B, T, HV, V, **make) if by_channel else None,
        a=a if free else None,
        b=-a * torch.rand(B, T, H, 1, **make) if free else None,
        cu_seqlens=torch.tensor([0, *batch]).cumsum(0).int() if packed else None,
    )
    for x in terms if packed else ():
        if x is not None and x.is_floating_point():
            x[:, sum(batch) :] = torch.nan
    return terms


def sequences(terms: LinearInputs) -> list[tuple[int, int, int]]:
    """Batch row, first token and tokens of each."""
    B, T = terms.q.shape[:2]
    if terms.cu_seqlens is None:
        return [(n, 0, T) for n in range(B)]
    return [(0, start, end - start) for start, end in pairwise(terms.cu_seqlens.tolist())]


class Scanned:
    """Results of the scans and of the scores' kernel, chunk by chunk."""

    def __init__(self, terms: LinearInputs, do: Tensor) -> None:
        B, T, HV, V = terms.v.shape
        K = terms.q.shape[-1]
        self.terms, self.do = terms, do
        self.packed = terms.cu_seqlens is not None
        chunks = T // C + terms.sequences if self.packed else B * -(-T // C)
        make = functools.partial(torch.full, fill_value=torch.nan, dtype=torch.float64)
        self.x, self.y = (make((chunks, HV, V, C)) for _ in range(2))
        self.states, self.dstates = (make((chunks, HV, V, K)) for _ in range(2))
        self.scores = [make((chunks, HV, C, C)) for _ in range(4)]
        self.own = make((chunks, HV, 2, C))
        # of dplr, for the gradient of v
        self.k = make((chunks, HV, C, K))
        self.qk, self.ak = (make((chunks, HV, C, C)) for _ in range(2))
        slot = 0
        for n, (b, start, length) in enumerate(sequences(terms)):
            first = start // C + n if self.packed else slot
            slot += -(-length // C)
            for h in range(HV):
                self.scan(b, start, length, h, first)

    def chunk(self, b: int, start: int, left: int, h: int) -> SimpleNamespace:
        """Operands that need no state, with zeros where there are no tokens."""
        t: Any = self.terms
        head = h // (t.v.shape[2] // t.q.shape[2])

        def rows(x: Tensor, head: int) -> Tensor:
            got = x.new_zeros(C, *x.shape[3:])
            got[: min(left, C)] = x[b, start : start + min(left, C), head]
            return got

        q, k, v, g, do = (
            *(rows(x, head) for x in (t.q, t.k)),
            *(rows(x, h) for x in (t.v, t.g, self.do)),
        )
        a, w = (k, k) if t.a is None else (rows(t.a, head), rows(t.b, head))
        G = g.cumsum(0)
        q = SCALE * q * G.exp()
        a = a * (G if t.a is None else G - g).exp()
        write, end = (-G).exp(), (G[-1] - G).exp()
        if t.erase is not None:
            a, v = a * rows(t.erase, h), v * rows(t.write, h)
        ab, ak = ((a @ (x * write).T).tril(-1) for x in (w, k))
        eye = torch.eye(C, dtype=v.dtype)
        if t.a is None:
            beta = rows(t.beta, h)[:, None] if t.erase is None else torch.ones(C, 1, dtype=v.dtype)
            r = (eye + beta * ab).inverse()
            u, from_state = r @ (beta * v), -r @ (beta * a)
        else:
            r = (eye - ab).inverse()
            u, from_state = r @ ak @ v, r @ a
        return SimpleNamespace(
            v=v, do=do, q=q, b=w * end, k=k * end, total=G[-1].exp()[:, None], r=r, u=u,
            w=from_state, qb=(q @ (w * write).T).tril(), qk=(q @ (k * write).T).tril(), ak=ak,
        )  # fmt: skip

    def scan(self, b: int, start: int, length: int, h: int, first: int) -> None:
        free = self.terms.a is not None
        count = -(-length // C)
        made = [self.chunk(b, start + i * C, length - i * C, h) for i in range(count)]
        state = torch.zeros_like(self.states[0, 0]).T
        for i, c in enumerate(made):
            self.states[first + i, h] = state.T
            c.x = c.u + c.w @ state
            state = c.total * state + c.b.T @ c.x + (c.k.T @ c.v if free else 0.0)
        grad = torch.zeros_like(state)
        for i, c in reversed(list(enumerate(made))):
            slot = first + i
            self.dstates[slot, h] = grad.T
            dx = c.qb.T @ c.do + c.b @ grad
            y = c.r.T @ dx
            grad = c.total * grad + c.q.T @ c.do + c.w.T @ dx
            self.x[slot, h], self.y[slot, h] = c.x.T, y.T
            self.k[slot, h], self.qk[slot, h], self.ak[slot, h] = c.k, c.qk, c.ak
            pairs = [(SCALE * c.do, c.x), (y, c.x), (SCALE * c.do, c.v), (y, c.v)]
            for out, (m, n) in zip(self.scores, pairs, strict=True):
                out[slot, h] = (m @ n.T).tril(-1)
            for n, (m, x) in enumerate((pairs[0], pairs[2])):
                self.own[slot, h, n] = (m * x).sum(1)


def tiles(x: Tensor | None, width: int, *block: int) -> Any:
    return x if x is None else emulator.Descriptor(x.contiguous(), width, *block)


def pointers(*given: Tensor | None) -> list[Any]:
    return [None if x is None else emulator.Pointer(x) for x in given]


# of the kernel of strong chunks: 16 tokens decay by less than 2^-160 here, and by more than 2^-2
LIMITS = {"levels": 1.0, "blocks": 80.0}


def gradients(scanned: Scanned, kernel: str) -> dict[str, Tensor]:
    """By a kernel: of q, k, a, b and g for each value head, and of beta what it knows of it."""
    terms, do = scanned.terms, scanned.do
    B, T, HV, V = terms.v.shape
    H, K = terms.q.shape[2:]
    free, chunks = terms.a is not None, scanned.x.shape[0]

    made = {n: torch.full((B, T, HV, K), torch.nan, dtype=do.dtype) for n in "qkabg"}
    made["beta"] = torch.full((3, B, T, HV), torch.nan, dtype=do.dtype)
    scores = scanned.scores if free else [*scanned.scores[:2], None, None]
    given = (terms.q, terms.k, terms.a, terms.b if terms.erase is None else terms.erase)
    of_b = HV if terms.erase is not None else H
    BK = K // 2
    read = [
        *(tiles(x, HV * V, C, V) for x in (terms.v if free else None, do)),
        *(tiles(x, C, V, C) for x in (scanned.x, scanned.y)),
        *(tiles(x, K, V, BK) for x in (scanned.states, scanned.dstates)),
        *(tiles(x, C, C, C) for x in scores),
    ]
    rest = pointers(
        terms.beta, scanned.own, *(made[n] for n in ("q", "k", "a", "b", "g", "beta")),
        terms.cu_seqlens,
    )  # fmt: skip
    flags = {"K": K, "V": V, "C": C, "DELTA": not free, "PACKED": scanned.packed}
    sizes = (T, terms.sequences, HV, H, B * T)
    marks = {"whole": 0, "deep": 0, "mixed": 0, "both": 1}.get(kernel, 3)  # of three chunks
    of_three = torch.arange(chunks * HV, dtype=torch.int32).view(chunks, HV) % 3
    strengths = {"deep": torch.full_like(of_three, 2), "mixed": of_three}
    strong = strengths.get(kernel, 3 * (of_three < marks).int())
    if marks < 3:
        heads = [*(tiles(x, H * K, C, BK) for x in given[:3]), tiles(given[3], of_b * K, C, BK)]
        heads.append(tiles(terms.g, HV * K, C, BK))
        args = (*heads, *read, *pointers(strong), *rest, SCALE, chunks * HV, *sizes)
        threads.launch(kernels().whole, 2, args, BK=BK, NK=2, WIDE=2, **flags)
    if marks > 0:
        flags |= {"LIMIT": LIMITS.get(kernel, 80.0), "SHIFT": 80.0}
        args = (*pointers(*given, terms.g), *read, *pointers(strong), *rest, SCALE)
        args = (*args, 2 * chunks * HV, *sizes)
        threads.launch(kernels().levels, 3, args, BK=BK, **flags)
    return made


@pytest.mark.parametrize("kernel", ["whole", "deep", "mixed", "both", *LIMITS])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_match_reference(case: tuple, kernel: str) -> None:
    # deep: from one quarter to the next by less than 2^-126
    terms = inputs(case, 16.0 if kernel == "deep" else 0.5)
    _, T, H, HV, K, *_ = case
    B = terms.q.shape[0]
    end = T if terms.cu_seqlens is None else int(terms.cu_seqlens[-1])
    do = torch.randn_like(terms.v)
    got = gradients(Scanned(terms, do), kernel)
    got["erase"] = got["b"]
    names = ("q", "k", "a", "b", "g", "beta", "erase")
    names = [n for n in names if getattr(terms, n) is not None]
    live: dict[str, Any] = {n: x for n, x in terms._asdict().items() if x is not None}
    for n in (*names, "v"):
        live[n] = live[n][:, :end].clone().requires_grad_()
    o, _ = linear_reference(LinearInputs(**live), SCALE)
    want = torch.autograd.grad((o * do[:, :end]).sum(), [live[n] for n in names])
    for n, x in zip(names, want, strict=True):
        if n == "beta":
            assert not got[n][1, :, :end].isnan().any()
            continue  # the first share is the scores' kernel's
        found = got[n][:, :end]
        found = found if n in ("g", "erase") else found.view(B, end, H, HV // H, K).sum(3)
        torch.testing.assert_close(found, x, rtol=1e-8, atol=1e-8)
        assert got[n][:, end:].isnan().all()


@pytest.mark.parametrize("case", [n for n in CASES if "gdn2" not in n])
def test_gradients_of_scores_and_values(case: str) -> None:
    terms = inputs(CASES[case])
    B, T, HV, V = terms.v.shape
    K, free = terms.q.shape[-1], terms.a is not None
    end = T if terms.cu_seqlens is None else int(terms.cu_seqlens[-1])
    scanned = Scanned(terms, do := torch.randn_like(terms.v))
    made = [torch.full_like(x, torch.nan) for x in (*scanned.scores, scanned.own)]
    dv = torch.full_like(do, torch.nan)
    dbeta = torch.full((3, B, T, HV), torch.nan, dtype=do.dtype)
    scans = (scanned.k, scanned.qk, scanned.ak, scanned.dstates)
    shapes = ((K, C, K), (C, C, C), (C, C, C), (K, V, K))
    read = [
        *(tiles(x, HV * V, C, V) for x in (terms.v, do)),
        *(tiles(x, C, V, C) for x in (scanned.x, scanned.y)),
        *(tiles(x if free else None, *shape) for x, shape in zip(scans, shapes, strict=True)),
        tiles(dv, HV * V, C, V),
    ]
    out = [x if free or n not in (2, 3) else None for n, x in enumerate(made)]
    rest = pointers(dv, terms.beta, None if free else dbeta, *out, terms.cu_seqlens)
    threads._LOCAL.queue, threads._LOCAL.errors = [], []  # it has one part
    flags = {"K": K, "V": V, "C": C, "DELTA": not free, "PACKED": scanned.packed}
    args = (*read, *rest, SCALE, T, terms.sequences, HV)
    threads.launch(kernels().scores, scanned.x.shape[0] * HV, args, **flags)
    pairs = list(zip(made, (*scanned.scores, scanned.own), strict=True))
    if not free:
        pairs = [*pairs[:2], (made[4][:, :, 0], scanned.own[:, :, 0])]
    for got, want in pairs:
        used = ~want.isnan()
        torch.testing.assert_close(got[used], want[used])
    live: dict[str, Any] = {n: x for n, x in terms._asdict().items() if x is not None}
    live |= {n: live[n][:, :end].clone() for n in live if n != "cu_seqlens"}
    live["v"].requires_grad_()
    o, _ = linear_reference(LinearInputs(**live), SCALE)
    (want,) = torch.autograd.grad((o * do[:, :end]).sum(), [live["v"]])
    torch.testing.assert_close(dv[:, :end], want, rtol=1e-8, atol=1e-8)
    assert dv[:, end:].isnan().all()
    assert free or not dbeta[0, :, :end].isnan().any()
