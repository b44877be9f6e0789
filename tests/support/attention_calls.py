"""The table of calls of the softmax family, and what each should give."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.attention.inputs import DIFFERENTIABLE, AttentionInputs, AttentionOptions
from slipstream.kernels.attention.reference import softmax_reference


@dataclass(frozen=True)
class Call:
    """q_lengths, k_lengths: of packed sequences. used: of the keys. slopes: their rank. Widths and
    lengths are odd, and windows narrower and wider than the interpreter's tiles."""

    name: str
    B: int = 1
    T: int = 45
    S: int = 45
    H: int = 2
    HKV: int = 1
    D: int = 20
    DV: int = 12
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    scale: float = 0.3
    q_lengths: tuple[int, ...] | None = None
    k_lengths: tuple[int, ...] | None = None
    used: tuple[int, ...] | None = None
    slopes: int = 0
    has: frozenset[str] = field(default_factory=frozenset)

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(self.scale, self.left, self.right, self.softcap)

    def terms(self, dtype: torch.dtype = torch.float32) -> AttentionInputs:
        N = self.B if self.q_lengths is None else len(self.q_lengths)
        rows = 1 if self.k_lengths is not None else N
        S, H, HKV = self.S, self.H, self.HKV
        x = torch.rand(rows, S, H)
        return AttentionInputs(
            torch.randn(self.B, self.T, H, self.D).to(dtype),
            torch.randn(rows, S, HKV, self.D).to(dtype),
            torch.randn(rows, S, HKV, self.DV).to(dtype),
            # mostly weak, some strong, one in 50 a reset
            g=wide(torch.log(1 - x * (x < 0.98)) - 1e5 * (x >= 0.98), dtype)
            if "g" in self.has
            else None,
            sinks=wide(torch.randn(H), dtype) if "sinks" in self.has else None,
            slopes=wide(torch.rand((H,) if self.slopes == 1 else (N, H)), dtype)
            if self.slopes
            else None,
            cu_q=offsets(self.q_lengths),
            cu_k=offsets(self.k_lengths),
            lengths=None if self.used is None else torch.tensor(self.used),
        )


def wide(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.double() if dtype == torch.float64 else x


def offsets(lengths: tuple[int, ...] | None) -> Tensor | None:
    return None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).int()


ODD = {"T": 80, "S": 76, "q_lengths": (5, 0, 40, 35, 0), "k_lengths": (0, 7, 50, 18, 1)}
G, SINKS = frozenset({"g"}), frozenset({"sinks"})
CALLS = [
    Call("one", T=1, S=1, H=1, D=1, DV=1),
    Call("causal", B=2, right=0),
    Call("full", S=53, HKV=2, D=16, DV=33),
    Call("more queries", T=53, S=37, D=16, right=0),
    Call("more keys", T=37, S=70, right=0),
    Call("narrow window", S=50, left=5, right=3),
    Call("wide window", T=90, S=80, left=40),
    Call("causal window", T=100, S=100, left=37, right=0, softcap=5.0),
    Call("window past the keys", left=500, right=500),
    Call("gate", B=2, right=0, has=G),
    Call("gate, sinks", T=40, S=70, right=0, softcap=3.0, has=G | SINKS),
    Call("slopes, sinks", B=2, T=50, S=60, softcap=3.0, slopes=2, scale=-0.3, has=SINKS),
    Call("packed", T=80, S=80, q_lengths=(5, 0, 40, 35), k_lengths=(5, 0, 40, 35), slopes=1,
         right=0, has=G),
    Call("packed apart", **ODD, left=20, right=2, slopes=2, has=SINKS),
    Call("packed, used", **ODD, used=(3, 2, 45, 18, 0), right=0, has=G),
    Call("packed, caches", T=80, S=50, q_lengths=(5, 0, 40, 35, 0), used=(0, 7, 50, 18, 1), left=20,
         right=0, slopes=2, has=SINKS),
    Call("used", B=3, T=50, S=60, used=(60, 9, 0), right=0, has=G),
    Call("few queries", B=2, T=3, S=130, H=4, HKV=2, used=(130, 77), right=0, softcap=2.0, slopes=2,
         has=SINKS),
    Call("one query", B=2, T=1, S=60, H=4, used=(55, 0), left=30, right=0),
    Call("no scale", scale=0.0, right=0),
]  # fmt: skip


def incoming(terms: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Gradients of o and lse."""
    B, T, H, _ = terms.q.shape
    do = torch.randn(B, T, H, terms.v.shape[-1]).to(terms.q.dtype)
    return do, torch.randn(B, H, T, dtype=terms.dtype)


def want(
    terms: AttentionInputs, options: AttentionOptions, do: Tensor, dlse: Tensor
) -> dict[str, Tensor]:
    """o, lse and the gradients by the reference in float64."""
    as_double = {
        n: x.detach().double() if x.is_floating_point() else x
        for n, x in terms._asdict().items()
        if x is not None
    }
    leaves = {n: as_double[n].requires_grad_() for n in DIFFERENTIABLE if n in as_double}
    o, lse = softmax_reference(AttentionInputs(**as_double), options)
    seen = torch.where(lse.isfinite(), lse, 0.0)  # -inf has no gradient
    loss = (o * do.double()).sum() + (seen * dlse.double()).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(leaves, grads))}


def got(
    module: Any, terms: AttentionInputs, options: AttentionOptions, do: Tensor, dlse: Tensor | None
) -> dict[str, Tensor]:
    o, lse = module.forward(terms, options)
    return {"o": o, "lse": lse, **module.backward(terms, options, o, lse, do, dlse)}


def check(found: dict[str, Tensor], right: dict[str, Tensor], limit: float, label: str) -> None:
    """Relative to the largest value, at least 1; infinite at the same places, and no NaN."""
    assert set(found) == set(right), label
    for name, y in right.items():
        x = found[name].double()
        assert x.shape == y.shape, (label, name)
        finite = y.isfinite()
        assert torch.equal(x[~finite], y[~finite]), (label, name)
        error = (x - y)[finite].abs().max().item() if finite.any() else 0.0
        size = max(1.0, y[finite].abs().max().item()) if finite.any() else 1.0
        assert error <= limit * size, f"{label}: {name} is off by {error / size:.1e}"
