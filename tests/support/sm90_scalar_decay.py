"""The additive family's Gluon scans on sm_90 as numpy, a thread for each part.

Sums, masks, rings, phases and segments are those of the kernel; layouts and rounding are not there
(tests/gluon_emulator/threads.py).
"""

import functools
import importlib
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from tests.gluon_emulator import linear as emulator
from tests.gluon_emulator import threads

C, SPAN = 64, 2
WIDTHS = (128, 256)  # of K and of V; HALVES is 1 for the second
SCALE = 0.3
MIN_CHUNK_GATE = -100.0
MODULES = "slipstream.kernels.linear.sm90.scalar_decay"


def _scan(x: Any, axis: int, combine: Any) -> Any:
    return threads.tensor(np.cumsum(x, axis))


@contextmanager
def emulated() -> Iterator[None]:
    language = threads._language()
    language.associative_scan = _scan
    with mock.patch.object(threads, "_language", return_value=language), emulator.emulated():
        yield


@functools.cache
def module(name: str) -> ModuleType:
    with emulated():
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
