"""The delta rule's kernels on sm_90 one by one: inputs, what float64 says, the calls.

bench/delta_hopper.py compares and times them.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs

CHUNK = 64


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
    "wide, plain": ("wide", Case(1, 128, 1, 1, 128, 128)),
    "wide, no gate": ("wide", Case(1, 640, 2, 2, 128, 128, "none", True)),
    "wide": ("wide", Case(2, 333, 2, 6, 128, 256, "mixed", True)),
    "wide, K 64": ("wide", Case(1, 640, 1, 2, 64, 128, "reset", True, dtype=torch.float16)),
    "wide, packed": ("wide", Case(1, 400, 2, 4, 128, 128, **STATE, lengths=PACKED)),
    "wide, keep": ("wide_keep", Case(2, 333, 2, 6, 128, 256, "mixed", True)),
    "wide, keep, packed": ("wide_keep", Case(1, 400, 2, 4, 128, 128, **STATE, lengths=PACKED)),
    "wide, long": ("wide", Case(2, 2100, 8, 80, 128, 128, "weak", True)),
    "op, crowded, state": ("op", Case(2, 333, 35, 70, 128, 128, "mixed", True)),
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
    "4 of 8192 16/64": Case(1, 32768, 16, 64, 128, 128, "weak", True, (8192,) * 4),
    "4 of 8192 16/32": Case(1, 32768, 16, 32, 128, 128, "weak", True, (8192,) * 4),
    "8 of 1024 16/32": Case(1, 8192, 16, 32, 128, 128, "weak", True, (1024,) * 8),
    "8 of 1024 8/24": Case(1, 8192, 8, 24, 128, 128, "weak", True, (1024,) * 8),
    "Q2": Case(1, 32768, 2, 8, 128, 128, "weak"),
    "4096 2/8": Case(1, 4096, 2, 8, 128, 128, "weak"),
    "Q2, unsplit": Case(1, 32768, 2, 8, 128, 128, "weak"),
}


def inputs(case: Case) -> LinearInputs:
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
    terms = LinearInputs(
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


def oracle(
    terms: LinearInputs, scale: float, do: Tensor, dfinal: Tensor | None
) -> dict[str, Tensor]:
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

    def __init__(self, terms: LinearInputs, case: Case) -> None:
        from slipstream.kernels.linear.sm90.delta import launch as sm90_delta_launch
        from slipstream.kernels.linear.triton.delta import backend as portable

        self.ours: Any = sm90_delta_launch
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

    def wide(self) -> dict[str, Tensor]:
        o = torch.empty_like(self.terms.v)
        final = o.new_empty(self.terms.state_shape, dtype=torch.float32)
        given = {"s_in": self.s_in, "s_out": final}
        self.ours.walk_wide(self.terms, *self.solved[:2], self.scale, o, **given)
        return {"o": o, "final": final}

    def wide_keep(self) -> dict[str, Tensor]:
        w = torch.empty_like(self.terms.v)
        given = {"s_in": self.s_in, "states": self.states}
        self.ours.walk_wide(self.terms, *self.solved[:2], 1.0, w, **given)
        return {"w": w, "states": self.states}

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
        from slipstream.kernels.linear.sm90.delta import backend

        both = []
        for each in (backend, self.portable):
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
        from slipstream.kernels.linear.sm90.delta import backend

        *_, kept = backend.forward_saving(self.terms, self.scale)
        return backend.backward(self.terms, self.do, None, self.scale, kept=kept)


def bounds_of(terms: LinearInputs) -> list[tuple[int, int, int]]:
    """Sequence, its first token, its tokens."""
    B, T = terms.q.shape[:2]
    if terms.cu_seqlens is None:
        return [(n, n * T, T) for n in range(B)]
    return [(n, b, e - b) for n, (b, e) in enumerate(pairwise(terms.cu_seqlens.tolist()))]


def used(terms: LinearInputs) -> list[int]:
    """Slots that have a chunk, in the order of the oracle's."""
    each = -(-terms.q.shape[1] // CHUNK)
    packed = terms.cu_seqlens is not None
    return [
        (begin // CHUNK + n if packed else n * each) + i
        for n, begin, length in bounds_of(terms)
        for i in range(-(-length // CHUNK))
    ]


def only_used(terms: LinearInputs, got: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of states only those of chunks: a copy, which is no part of the kernel's time."""
    return {n: x[used(terms)] if n.endswith("states") else x for n, x in got.items()}


def met(
    terms: LinearInputs, states: Tensor, segment: int, slots: int, after: bool = False
) -> Tensor:
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
