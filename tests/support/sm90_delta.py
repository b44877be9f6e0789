"""The delta rule's Gluon kernels under the emulator: calls, launches by hand and tolerances."""

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from tests.gluon_emulator import threads
from tests.gluon_emulator.linear import Descriptor, Pointer, emulated, halves

C, BV = 64, 16


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


@functools.cache
def kernels() -> SimpleNamespace:
    files = {  # file and kernel of each name
        "solve": ("solve_tril", "solve_tril"), "scan": ("chunk_fwd", "chunk_fwd"),
        "back": ("chunk_dstate", "chunk_dstate"), "grads": ("dqkg", "dqkg"),
        "ends": ("segment_transition", "segment_transition"),
        "wide": ("chunk_fwd_2tile", "chunk_fwd_2tile"), "fused": ("bwd_fused", "chunk_bwd"),
    }  # fmt: skip
    with emulated():
        # not from the package, which may have those that are compiled
        found = {
            name: importlib.import_module(f"slipstream.kernels.linear.sm90.delta.{file}")
            for name, (file, _) in files.items()
        }
        inverse = importlib.import_module("slipstream.kernels.linear.sm90.common.tril_inverse")
        vars(inverse)["halves"] = halves
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
        if kernel is kernels().back:
            states = [None, *states]
        args = (*made, Pointer(out), Pointer(self.rows), *states, *sizes, *more)
        threads.launch(kernel, tiles * self.HV * self.slots, args, **flags, **ends)

    def scan(
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
        kernel, sizes = (kernels().wide if wide else kernels().scan), (every,)
        flags = {"SAVE_STATES": keep, "SAVE_CHECKPOINTS": every > 0}
        self.call(kernel, tensors, s_in, s_out, sizes, **flags)
        return out, states

    def wide(self, s_in: Any, s_out: Any, keep: bool, every: int = 0) -> tuple[Tensor, Tensor]:
        return self.scan(s_in, s_out, keep, every, True)

    def back(self, do: Tensor, s_in: Any, s_out: Any) -> tuple[Tensor, Tensor]:
        t = self.terms
        dv = self.empty(*t.v.shape)
        states = self.empty(self.chunks, self.HV, self.V, self.K)
        tensors = [(t.q, "q"), (t.k, "q"), (do, "v"), (self.r, "r"), (dv, "v"), (states, "s")]
        self.call(kernels().back, tensors, s_in, s_out)
        return dv, states

    def starts(self, s_out: Tensor | None) -> Tensor:
        """The states before segments, of one scan."""
        t = self.terms
        blocks = {"q": (C, self.K), "v": (C, BV), "r": (C, C)}
        widths = {"q": self.H * self.K, "v": self.HV * self.V, "r": self.HV * C}
        given = [(t.k, "q"), (t.v, "v"), (self.r, "r")]
        made = self.empty(self.slots, self.HV, self.K, self.V)
        ends = [None if x is None else Pointer(x) for x in (t.initial_state, s_out)]
        cu, _, *rest = self.sizes
        args = [Descriptor(x, widths[n], *blocks[n]) for x, n in given]
        args += [Pointer(self.rows), None, ends[0], None, None, cu]
        flags = {name: x for name, x in self.flags.items() if name != "SPLIT"}
        flags |= {"HAS_S_IN": t.initial_state is not None, "HAS_S_OUT": s_out is not None}
        flags |= {"BLOCKS": C // 16, "states_ptr": Pointer(made), "s_out_ptr": ends[1]}
        programs = self.V // BV * self.HV * t.sequences
        threads.launch(kernels().ends, programs, (*args, *rest), **flags)
        return made

    def grads(
        self, do: Tensor, w: Tensor, dv: Tensor, states: Tensor, dstates: Tensor, G: int
    ) -> dict:
        """Gradients of q, k, beta and g. G: value heads a program."""
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
        threads.launch(kernels().grads, self.chunks * HV, args, **flags, BK=BK, GROUPED_HEADS=G > 1)
        return {n: x.view(self.B, self.T, H, -1, K).sum(3) for n, x in made.items()} | sums


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want.detach(), rtol=1e-8, atol=1e-8)


def fused(
    run: Run, do: Tensor, marks: Tensor, ends: tuple, G: int, every: int, slots: int
) -> dict[str, Tensor]:
    """Gradients of q, k, v, beta and g. ends: s_in and s_out; slots: programs at a time."""
    t, (HV, V), (H, K) = run.terms, (run.HV, run.V), (run.H, run.K)
    heads, w, programs = HV // G, run.empty(*run.terms.v.shape), run.HV * run.slots
    made = {n: run.empty(run.B, run.T, heads, K) for n in "qk"}
    sums = {n: run.empty(run.B, run.T, HV) for n in ("beta", "g")}
    states = run.empty(slots * max(every - 2, 1), V, K)
    given = [Descriptor(x, H * K, C, K) for x in (t.q.clone(), t.k)]
    given += [Descriptor(x, HV * V, C, V) for x in (t.v, do)]
    given += [Descriptor(run.r, HV * C, C, C), Descriptor(w, HV * V, C, V)]
    given += [Descriptor(x, K, V, K) for x in (states, marks)]
    given += [Descriptor(x, heads * K, C, K) for x in made.values()]
    pointers = [Pointer(x) for x in (*made.values(), w, run.empty(slots, V, K))]
    pointers += [Pointer(x) for x in (run.rows, *sums.values())]
    pointers += [None if x is None else Pointer(x) for x in ends]
    flags = {name: run.flags[name] for name in ("K", "V", "C", "HAS_GATE", "PACKED", "ST", "SPLIT")}
    flags |= {"HAS_S_IN": ends[0] is not None, "HAS_S_OUT": ends[1] is not None}
    counts = torch.zeros(slots + run.chunks * heads, dtype=torch.int32)
    cu, *sizes = run.sizes[:6]
    args = (*given, *pointers, cu, Pointer(counts), *sizes, G, run.T, every, slots)
    # with turns a program may wait for one that has no slot, if there are so few
    launch = threads.launch if slots == 1 or G > 1 else threads.launch_together
    launch(
        kernels().fused, programs, args, **flags, BK=K // 2, WARPS=4, REGISTERS=0, LOAD_REGISTERS=0,
        GROUPED_HEADS=G > 1,
    )  # fmt: skip
    assert not counts[:slots].any()
    return {n: x.view(run.B, run.T, H, -1, K).sum(3) for n, x in made.items()} | sums | {"v": w}


def wanted(terms: LinearInputs, do: Tensor, dfinal: Tensor, end: int) -> dict[str, Tensor]:
    """The reference's o and final states, and its gradients; end: of the last sequence."""
    live: dict[str, Any] = {
        name: x[:, :end].clone().requires_grad_() if name in ("q", "k", "v", "g", "beta") else x
        for name, x in terms._asdict().items()
        if x is not None
    }
    start = torch.zeros_like(dfinal) if terms.initial_state is None else terms.initial_state
    live["initial_state"] = start.clone().requires_grad_()
    o, final = linear_reference(LinearInputs(**live), 0.3)
    loss = (o * do[:, :end]).sum() + (final * dfinal).sum()
    names = [n for n in ("v", "initial_state", "q", "k", "beta", "g") if n in live]
    grads = torch.autograd.grad(loss, [live[n] for n in names])
    return dict(zip(names, grads, strict=True)) | {"o": o.detach(), "final": final.detach()}
