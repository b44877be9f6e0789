"""The delta rule on sm_90 in Gluon: right at odd sizes, then how fast beside the portable kernels.

python bench/delta_hopper.py            # --check, then --times
python bench/delta_hopper.py --check    # against float64, the simplest first
python bench/delta_hopper.py --times    # each kernel, the portable path
python bench/delta_hopper.py --peer     # fla and flash_qla too, which tune themselves for a minute

Everything runs in a child: where it dies or hangs, that is the line, and the next child goes on.
"""

import argparse
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from record import record
from torch import Tensor

from slipstream.kernels.linear.terms import Terms

PATIENCE = 45  # seconds without a line, after which a child hangs
PEER_PATIENCE = 150
COPY_BYTES_PER_MS = 4.28e9  # device copy on an H200
CHUNK = 64
LIMIT = 0.008


class Case(NamedTuple):
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    gate: str = "none"
    state: bool = False
    lengths: tuple[int, ...] | None = None
    segment: int | None = None
    dtype: torch.dtype = torch.bfloat16


PACKED = (5, 0, 200, 1, 64, 115)
STATE = {"gate": "weak", "state": True}
# Name: what is compared, and with what. Of packed ones, T may be more than the lengths: the rest
# is NaN.
CHECKS = {
    "inverse, plain": ("inverse", Case(1, 128, 1, 1, 128, 64)),
    "inverse": ("inverse", Case(2, 333, 2, 4, 128, 64, "mixed")),
    "inverse, packed": ("inverse", Case(1, 400, 2, 4, 64, 64, "reset", lengths=PACKED)),
    "one chunk": ("o", Case(1, 64, 1, 1, 128, 64)),
    "chunks": ("o", Case(1, 640, 1, 1, 128, 64)),
    "two tiles of V": ("o", Case(1, 640, 2, 2, 128, 128)),
    "gate": ("o", Case(1, 640, 2, 2, 128, 128, "weak")),
    "gate to -50": ("o", Case(1, 640, 2, 2, 128, 128, "mixed")),
    "gate -inf": ("o", Case(1, 640, 2, 2, 128, 128, "reset")),
    "state": ("o", Case(1, 256, 2, 2, 128, 128, **STATE)),
    "grouped": ("o", Case(1, 256, 2, 6, 128, 128, **STATE)),
    "short chunk": ("o", Case(2, 70, 1, 2, 128, 128, **STATE)),
    "one token": ("o", Case(3, 1, 1, 2, 128, 128, **STATE)),
    "packed": ("o", Case(1, 400, 2, 4, 128, 128, **STATE, lengths=PACKED)),
    "float16": ("o", Case(2, 333, 1, 2, 128, 128, **STATE, dtype=torch.float16)),
    "K 64": ("o", Case(2, 333, 1, 2, 64, 64, "mixed", True)),
    "V 256": ("o", Case(1, 333, 1, 2, 128, 256, **STATE)),
    "segments": ("o", Case(2, 600, 1, 2, 128, 128, "weak", segment=128)),
    "packed segments": ("o", Case(1, 700, 2, 4, 128, 128, "weak", False, (300, 0, 70, 330), 128)),
    "long": ("o", Case(1, 4096, 4, 16, 128, 128, **STATE)),
    "many heads": ("o", Case(2, 500, 70, 70, 128, 128, "weak")),
    "keep": ("keep", Case(1, 640, 2, 4, 128, 128, **STATE)),
    "keep, packed": ("keep", Case(1, 400, 2, 4, 128, 128, **STATE, lengths=PACKED)),
    "keep, K 64": ("keep", Case(2, 333, 1, 2, 64, 64, "none", True)),
    "back, no gate": ("back", Case(1, 640, 1, 1, 128, 64)),
    "back": ("back", Case(1, 640, 2, 4, 128, 128, **STATE)),
    "back to -50": ("back", Case(2, 333, 2, 4, 128, 128, "mixed", True)),
    "back, packed": ("back", Case(1, 400, 2, 4, 128, 128, **STATE, lengths=PACKED)),
    "keep, segments": ("keep", Case(1, 700, 2, 4, 128, 128, "weak", False, (300, 0, 70, 330), 128)),
    "back, segments": ("back", Case(1, 700, 2, 4, 128, 128, "weak", False, (300, 0, 70, 330), 128)),
    "back, K 64": ("back", Case(2, 333, 1, 2, 64, 64, "reset", True)),
    "op": ("op", Case(2, 333, 2, 4, 128, 128, **STATE)),
    "op, packed": ("op", Case(1, 400, 2, 4, 128, 128, **STATE, lengths=PACKED)),
    "op, split": ("op", Case(1, 16384, 2, 4, 128, 128, "weak")),
    "op, split, state": ("op", Case(1, 4100, 1, 2, 128, 128, "mixed", True)),
    "op, split, no gate": ("op", Case(2, 2500, 1, 2, 128, 128, "none", True)),
    "op, split, reset": ("op", Case(1, 2500, 2, 2, 64, 128, "reset", True)),
    "op, split, packed": ("op", Case(1, 10000, 1, 2, 128, 128, "weak", True, (0, 6990, 70, 2900))),
    "op, split, faint": ("op", Case(1, 4100, 1, 2, 128, 128, "faint", True)),
    "op, crowded": ("op", Case(1, 200, 70, 70, 128, 128)),
    "back, many": ("back", Case(1, 2048, 70, 70, 128, 128, "weak", dtype=torch.float16)),
}
TIMES = {
    "Q1": Case(1, 8192, 16, 64, 128, 128, "weak"),
    "A, no gate": Case(1, 8192, 96, 96, 128, 128),
    "A, gate": Case(1, 8192, 96, 96, 128, 128, "weak"),
    "2048 16/64": Case(1, 2048, 16, 64, 128, 128, "weak"),
    "4096 16/32": Case(1, 4096, 16, 32, 128, 128, "weak"),
    "4 of 8192 8/24": Case(1, 32768, 8, 24, 128, 128, "weak", True, (8192,) * 4),
    "8 of 1024 16/64": Case(1, 8192, 16, 64, 128, 128, "weak", True, (1024,) * 8),
    "Q2": Case(1, 32768, 2, 8, 128, 128, "weak"),
    "4096 2/8": Case(1, 4096, 2, 8, 128, 128, "weak"),
    "Q2, unsplit": Case(1, 32768, 2, 8, 128, 128, "weak"),
}
PEERS = {"fla": "fla.ops.gated_delta_rule", "flash_qla": "flash_qla"}


def inputs(case: Case) -> Terms:
    """Keys of norm 1 and beta from 0 to 2."""
    B, T, H, HV, K, V, gate, state, lengths, _, dtype = case
    N = B if lengths is None else len(lengths)
    make = {"device": "cuda", "dtype": dtype}
    x = torch.rand(B, T, HV, device="cuda")
    g = {
        "none": None,
        "weak": -0.1 * x,
        "faint": -0.001 * x,
        "mixed": -torch.where(torch.rand_like(x) < 0.2, 50 * x, 0.1 * x),
        "reset": torch.where(x < 0.1, -torch.inf, -0.1 * x),
    }[gate]
    cu = None
    if lengths is not None:
        cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    terms = Terms(
        torch.randn(B, T, H, K, **make),
        F.normalize(torch.randn(B, T, H, K, **make), dim=-1),
        torch.randn(B, T, HV, V, **make),
        g=g,
        beta=2 * torch.rand(B, T, HV, device="cuda"),
        initial_state=torch.randn(N, HV, K, V, device="cuda") if state else None,
        cu_seqlens=cu,
    )
    if lengths is not None and sum(lengths) < T:
        for y in (terms.q, terms.k, terms.v, terms.g, terms.beta):
            if y is not None:
                y[:, sum(lengths) :] = float("nan")
    return terms


def oracle(terms: Terms, scale: float, do: Tensor, dfinal: Tensor | None) -> dict[str, Tensor]:
    """In float64: o, final, w, and S^T before each chunk; dv, dinitial, dS^T after each chunk.

    By the formulas of the walks' docstrings, chunk by chunk, with R by torch.linalg.
    """
    B, T, HV = terms.v.shape[:3]
    given = (terms.q, terms.k, terms.v, do, terms.beta, terms.g)
    q, k, v, d, beta, g = (None if x is None else x.double().flatten(0, 1) for x in given)
    assert q is not None and k is not None and v is not None and beta is not None and d is not None
    q, k = (x.repeat_interleave(HV // terms.q.shape[2], 1).transpose(0, 1) for x in (q, k))
    v, d, beta = v.transpose(0, 1), d.transpose(0, 1), beta.T
    g = torch.zeros_like(beta) if g is None else g.T.clamp(min=-1e4)
    cu = terms.cu_seqlens
    bounds = [i * T for i in range(B + 1)] if cu is None else cu.tolist()
    o, w, dv = (torch.full_like(v, float("nan")) for _ in range(3))
    r = v.new_full((*v.shape[:2], CHUNK), float("nan"))
    final, states, dinitial, dstates = [], [], [], []
    for n, (begin, end) in enumerate(pairwise(bounds)):
        S = v.new_zeros(HV, q.shape[-1], v.shape[-1])
        dS = S if dfinal is None else dfinal[n].double()
        if terms.initial_state is not None:
            S = terms.initial_state[n].double()
        chunks = []
        for t in range(begin, end, CHUNK):
            s = slice(t, min(t + CHUNK, end))
            G, b = g[:, s].cumsum(-1), beta[:, s]
            decay = (G[:, :, None] - G[:, None, :]).tril().exp().tril()
            R = (k[:, s] @ k[:, s].mT) * decay * b[:, None, :]
            R = torch.linalg.inv(R.tril(-1) + torch.eye(s.stop - t, device=v.device))
            r[:, s] = F.pad(R, (0, CHUNK - (s.stop - t)))
            A = scale * (q[:, s] @ k[:, s].mT) * decay
            start, left = G.exp()[..., None], (G[:, -1:] - G).exp()[..., None]
            whole = G[:, -1].exp()[:, None, None]
            chunks.append((s, b[..., None], R, A, start, left, whole))
            states.append(S.mT)
            w[:, s] = R @ (v[:, s] - (k[:, s] * start) @ S)
            x = b[..., None] * w[:, s]
            o[:, s] = scale * (q[:, s] * start) @ S + A @ x
            S = whole * S + (k[:, s] * left).mT @ x
        final.append(S)
        after = []
        for s, b, R, A, start, left, whole in reversed(chunks):
            after.append(dS.mT)
            dv[:, s] = R.mT @ (b * (A.mT @ d[:, s] + (k[:, s] * left) @ dS))
            dS = whole * dS + scale * (q[:, s] * start).mT @ d[:, s]
            dS = dS - (k[:, s] * start).mT @ dv[:, s]
        dinitial.append(dS)
        dstates += reversed(after)
    rows = {"o": o, "w": w, "dv": dv}
    rows = {name: y.transpose(0, 1).view(terms.v.shape) for name, y in rows.items()}
    rows["r"] = r.transpose(0, 1).view(B, T, HV, CHUNK)
    each = {"final": final, "states": states, "dinitial": dinitial, "dstates": dstates}
    return {**rows, **{name: torch.stack(y) for name, y in each.items()}}


def error(got: Tensor, want: Tensor) -> float:
    """Relative, root of the mean of squares, where `want` is a number; nan if `got` is none."""
    known = ~want.isnan()
    got, want = got.double()[known], want[known]
    return ((got - want).square().mean() / want.square().mean()).sqrt().item()


class Calls:
    """The kernels on one case's inputs. segments: as portable's Split; s_in: what each meets."""

    def __init__(self, terms: Terms, case: Case) -> None:
        from slipstream.kernels.linear.hopper import delta_launch
        from slipstream.kernels.linear.triton import delta_launch as portable

        self.ours: Any = delta_launch
        self.portable: Any = portable
        self.terms = portable._prepare(terms)
        self.scale = case.K**-0.5
        self.do = torch.randn_like(terms.v)
        self.dfinal = None
        if case.state:
            self.dfinal = torch.randn(terms.state_shape, device="cuda")
        self.s_in = self.terms.initial_state
        self.solved = self.solve()
        B, T = terms.q.shape[:2]
        chunks = B * -(-T // CHUNK) if terms.cu_seqlens is None else T // CHUNK + terms.sequences
        self.states = terms.v.new_empty(chunks, case.HV, case.V, case.K)
        self.segment = None
        if case.segment is not None:
            slots = B * -(-T // case.segment)
            if case.lengths is not None:
                slots = T // case.segment + len(case.lengths)
            self.segment = (case.segment, slots)

    def solve(self) -> Any:
        return self.portable._solve(self.terms)

    def solve90(self) -> Any:
        return self.ours.solve(self.terms, *(torch.empty_like(x) for x in self.solved[:2]))

    def inverse(self) -> dict[str, Tensor]:
        """Of rows only what portable's differ by."""
        r, rows, _ = self.solve90()
        off = (rows - self.solved.rows).abs().max()
        return {"r": r, "rows": off}

    def o(self) -> dict[str, Tensor]:
        o = torch.empty_like(self.terms.v)
        final = None
        if self.segment is None:
            final = o.new_empty(self.terms.state_shape, dtype=torch.float32)
        given = {"s_in": self.s_in, "s_out": final, "segment": self.segment}
        self.ours.walk(self.terms, *self.solved[:2], self.scale, o, **given)
        return {"o": o} if final is None else {"o": o, "final": final}

    def keep(self) -> dict[str, Tensor]:
        w = torch.empty_like(self.terms.v)
        given = {"s_in": self.s_in, "segment": self.segment}
        self.ours.walk(self.terms, *self.solved[:2], 1.0, w, states=self.states, **given)
        return {"w": w, "states": self.states}

    def back(self) -> dict[str, Tensor]:
        dv = torch.empty_like(self.terms.v)
        dinitial = None
        if self.segment is None:
            dinitial = dv.new_empty(self.terms.state_shape, dtype=torch.float32)
        self.ours.walk_back(
            self.terms,
            self.do,
            *self.solved[:2],
            self.scale,
            dv,
            self.states,
            s_in=self.dfinal,
            s_out=dinitial,
            segment=self.segment,
        )
        made = {"dv": dv, "dstates": self.states}
        return made if dinitial is None else {**made, "dinitial": dinitial}

    def op(self) -> dict[str, Tensor]:
        """The operator; of what the oracle has not, how far from portable's."""
        from slipstream.kernels.linear.hopper import launch

        both = []
        for each in (launch, self.portable):
            o, final = each.forward(self.terms, self.scale)
            grads = each.backward(self.terms, self.do, self.dfinal, self.scale)
            both.append({"o": o, "final": final, **grads})
        mine, theirs = both
        known = {"o": "o", "final": "final", "v": "dv", "initial_state": "dinitial"}
        found = {f"{n}'": o.new_tensor(error(x, theirs[n].double())) for n, x in mine.items()}
        return found | {known[n]: x for n, x in mine.items() if n in known}

    def grads(self, own: Any) -> Any:
        like, rows = self.do, self.solved.rows
        given = (like, rows, like, like, self.states, self.states, self.scale, own)
        return self.portable._grads(self.terms, *given)

    def forward(self) -> Any:
        self.solved = self.solve90()
        return self.o()

    def both(self) -> Any:
        """Backward with what forward kept."""
        from slipstream.kernels.linear.hopper import launch

        *_, kept = launch.forward_kept(self.terms, self.scale)
        return launch.backward(self.terms, self.do, None, self.scale, kept=kept)


def check(name: str) -> str:
    from slipstream.kernels.linear.hopper import plan

    kind, case = CHECKS[name]
    terms = inputs(case)
    refused = plan.refuses(terms)
    if refused:
        return f"REFUSED: {refused}"
    calls = Calls(terms, case)
    want = oracle(terms, calls.scale, calls.do, calls.dfinal)
    if calls.segment is not None:
        calls.s_in = met(terms, want["states"], *calls.segment)
        calls.dfinal = met(terms, want["dstates"], *calls.segment, after=True)
    fn = getattr(calls, kind)
    start = time.perf_counter()
    got = only_used(terms, fn())
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    again = only_used(terms, fn())
    same = all(torch.equal(*(y[n].nan_to_num() for y in (got, again))) for n in got)
    found = {n: error(x, want[n]) if n in want else x.item() for n, x in got.items()}
    ok = same and all(e <= LIMIT for e in found.values())
    text = ", ".join(f"{n} {e:.1e}" for n, e in found.items())
    return f"{'ok   ' if ok else 'WRONG'} {text}, first {first:.1f} s" + (
        "" if same else ", NOT THE SAME TWICE"
    )


def bounds_of(terms: Terms) -> list[tuple[int, int, int]]:
    """Sequence, its first token, its tokens."""
    B, T = terms.q.shape[:2]
    if terms.cu_seqlens is None:
        return [(n, n * T, T) for n in range(B)]
    return [(n, b, e - b) for n, (b, e) in enumerate(pairwise(terms.cu_seqlens.tolist()))]


def used(terms: Terms) -> list[int]:
    """Slots that have a chunk, in the order of the oracle's."""
    each = -(-terms.q.shape[1] // CHUNK)
    packed = terms.cu_seqlens is not None
    return [
        (begin // CHUNK + n if packed else n * each) + i
        for n, begin, length in bounds_of(terms)
        for i in range(-(-length // CHUNK))
    ]


def only_used(terms: Terms, got: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of states only those of chunks: a copy, which is no part of the kernel's time."""
    return {n: x[used(terms)] if n.endswith("states") else x for n, x in got.items()}


def met(terms: Terms, states: Tensor, segment: int, slots: int, after: bool = False) -> Tensor:
    """The state [K, V] that each segment meets, in its slot, from those before each chunk.

    Or, from those after each chunk, the last one's.
    """
    given = states.new_full((slots, *states.shape[1:]), float("nan"))
    each, packed, chunk = -(-terms.q.shape[1] // segment), terms.cu_seqlens is not None, 0
    for n, begin, length in bounds_of(terms):
        first = begin // segment + n if packed else n * each
        chunks = -(-length // CHUNK)
        for i in range(-(-length // segment)):
            past = min((i + 1) * (segment // CHUNK), chunks)
            given[first + i] = states[chunk + (past - 1 if after else i * (segment // CHUNK))]
        chunk += chunks
    return given.mT.float().contiguous()


def bench(fn: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    timed: Any = do_bench
    return timed(fn, warmup=15, rep=60, return_mode="median")


def host(fn: Callable[[], Any]) -> float:
    """Microseconds until a call returns."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(50):
        fn()
    took = (time.perf_counter() - start) * 2e4
    torch.cuda.synchronize()
    return took


def times(name: str) -> str:
    case = TIMES[name]
    terms = inputs(case)
    calls = Calls(terms, case)
    portable, solved, scale = calls.portable, calls.solved, calls.scale
    from slipstream.kernels.linear.hopper import launch

    like = torch.empty_like(terms.v)

    def portable_back() -> None:
        given = {"s_in": calls.dfinal, "s_out": None}
        portable._walk_back(calls.terms, calls.do, solved, scale, like, calls.states, **given)

    fns: dict[str, Callable[[], Any]] = {
        "p_solve": calls.solve,
        "solve": calls.solve90,
        "walk": calls.o,
        "keep": calls.keep,
        "back": calls.back,
        "forward": calls.forward,
        "p_keep": lambda: portable._walk(
            calls.terms, solved, scale, like, states=calls.states, s_in=calls.s_in
        ),
        "p_back": portable_back,
        "grads": lambda: calls.grads(launch._OWN),
        "p_grads": lambda: calls.grads(None),
        "op": lambda: launch.forward(calls.terms, scale),
        "op_back": lambda: launch.backward(calls.terms, calls.do, None, scale),
        "both": calls.both,
        "p_forward": lambda: portable.forward(calls.terms, scale),
        "p_backward": lambda: portable.backward(calls.terms, calls.do, None, scale),
    }
    if (split := launch._split(calls.terms)) is not None:
        solved90 = calls.solve90()
        fns["meet"] = lambda: launch._meet(calls.terms, solved90, split)
    row: dict[str, object] = {"shape": name}
    for label, fn in fns.items():
        try:
            fn()
            row[label] = round(bench(fn), 4)
        except Exception as e:
            if "CUDA" in str(e):
                raise
            row[label] = f"{type(e).__name__}: {e}"[:60]
    moved = sum(x.numel() * x.element_size() for x in (terms.q, terms.k, terms.v, terms.v))
    row["floor"] = round(moved / COPY_BYTES_PER_MS, 4)
    row["us_a_chunk"] = ""
    if isinstance(row["walk"], float):
        longest = case.T if case.lengths is None else max(case.lengths)
        row["us_a_chunk"] = round(row["walk"] * 1e3 / -(-longest // CHUNK), 3)
    row["host_us"] = round(host(fns["forward"]))
    record("delta_hopper", [row])
    return ", ".join(f"{n} {x}" for n, x in row.items() if n != "shape")


def stages(name: str) -> str:
    """The walks with other depths of their rings."""
    case = TIMES[name]
    calls = Calls(inputs(case), case)
    kept, line = calls.ours.STAGES, []
    for depth in (2, 3):
        calls.ours.STAGES = depth
        both = " ".join(f"{bench(fn):.4f}" for fn in (calls.o, calls.back))
        line.append(f"{depth}: {both}")
    calls.ours.STAGES = kept
    return "walk, back by stages " + ", ".join(line)


def solve_registers(name: str) -> str:
    """The inverse with fewer registers, so more programs a multiprocessor; portable's last."""
    case = TIMES[name]
    calls = Calls(inputs(case), case)
    line = []
    for most in (168, 128):
        with mock.patch.dict(calls.ours.SOLVE, {"maxnreg": most}):
            line.append(f"{most} {bench(calls.solve90):.4f}")
    made = calls.portable.options

    def options(*args: Any) -> dict[str, Any]:
        return {**made(*args), "maxnreg": 128}

    with mock.patch.object(calls.portable, "options", options):
        line.append(f"portable 128 {bench(calls.solve):.4f}")
    return "solve by maxnreg " + ", ".join(line)


def peer(package: str, name: str) -> str:
    import importlib

    try:
        fn = importlib.import_module(PEERS[package]).chunk_gated_delta_rule
    except ImportError as e:
        return f"{package}: {e}"
    case = TIMES[name]
    terms = inputs(case)
    q, k = terms.q, terms.k
    if package == "fla":  # wants as many heads of q and k as of v
        q, k = (x.repeat_interleave(case.HV // case.H, 2) for x in (q, k))

    def run() -> Any:
        return fn(q, k, terms.v, g=terms.g, beta=terms.beta, cu_seqlens=terms.cu_seqlens)

    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    return f"{package} {bench(run):.4f} ms, first {first:.1f} s"


def items(options: argparse.Namespace) -> list[tuple[str, Callable[[], str]]]:
    every = not (options.check or options.times or options.peer)
    found: list[tuple[str, Callable[[], str]]] = []
    if options.check or every:
        found += [(name, lambda name=name: check(name)) for name in CHECKS]
    if options.times or every:
        found += [(name, lambda name=name: times(name)) for name in TIMES]
        found += [("Q1", lambda: stages("Q1")), ("Q1", lambda: solve_registers("Q1"))]
    if options.peer:
        found += [(n, lambda n=n, p=p: peer(p, n)) for p in PEERS for n in ("Q1", "Q2, unsplit")]
    return found


def child(todo: list[tuple[str, Callable[[], str]]], begin: int) -> None:
    """One line an item, with its number first."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is NaN then
    for i, (name, fn) in enumerate(todo[begin:], begin):
        if name in TIMES:
            torch.use_deterministic_algorithms(False)
        torch.manual_seed(i)
        try:
            text = fn()
        except Exception as e:
            text = f"FAILED {type(e).__name__}: {' '.join(str(e).split())[:160]}"
            if "CUDA" in str(e):
                print(f"{i}\t{text}", flush=True)
                raise SystemExit(1) from None  # nothing runs in this process any more
        print(f"{i}\t{text}", flush=True)


def lines_of(process: subprocess.Popen) -> "queue.Queue[str | None]":
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def parent(todo: list[tuple[str, Callable[[], str]]], patience: float) -> bool:
    done, fine, deaths = 0, True, 0
    while done < len(todo) and deaths < 4:
        command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--child", str(done)]
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        lines, last, before = lines_of(process), "", done
        while done < len(todo):
            try:
                line = lines.get(timeout=patience)
            except queue.Empty:
                line, last = None, f"HANGS: no result in {patience:.0f} s"
            if line is None:
                break
            number, tab, text = line.partition("\t")
            if tab and number == str(done):
                print(f"{todo[done][0]:16} {text.rstrip()}", flush=True)
                fine &= not text.startswith(("WRONG", "FAILED", "REFUSED"))
                done += 1
            elif line.strip():
                last = line.strip()
        process.kill()
        process.wait()
        if done < len(todo) and (done == before or "HANGS" in last or process.returncode != 1):
            print(f"{todo[done][0]:16} DIED: {last[:200]}", flush=True)
            deaths = deaths + 1 if done == before else 0
            done, fine = done + 1, False
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("check", "times", "peer"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--child", type=int)
    options = parser.parse_args()
    todo = items(options)
    if options.child is not None:
        child(todo, options.child)
        return
    fine = parent(todo, PEER_PATIENCE if options.peer else PATIENCE)
    raise SystemExit(0 if fine else "see above")


if __name__ == "__main__":
    main()
