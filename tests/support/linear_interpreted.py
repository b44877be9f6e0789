"""Shared by the interpreted checks of the linear family: gates, inputs, the float64 reference, and
a back end beside it."""

import importlib
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import DIFFERENTIABLE, LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from tests.support.operators import offsets, relative_error

GATES = {
    "none": lambda x: None,
    "weak": lambda x: -0.1 * x,
    "strong": lambda x: -50 * x,
    "mixed": lambda x: -torch.where(torch.rand_like(x) < 0.2, 50 * x, 0.1 * x),
    "reset": lambda x: torch.where(x < 0.1, -torch.inf, -0.1 * x),
    "per head": lambda x: (-0.1 * x[:1, :1]).expand(x.shape),
}


def reference(
    terms: LinearInputs, scale: float, do: Tensor, dfinal: Tensor | None
) -> dict[str, Tensor]:
    wide = {
        name: x.detach().double().requires_grad_()
        for name, x in terms._asdict().items()
        if x is not None and name != "cu_seqlens"
    }
    o, final = linear_reference(LinearInputs(**wide, cu_seqlens=terms.cu_seqlens), scale)
    loss = (o * do.double()).sum() + (0 if dfinal is None else (final * dfinal.double()).sum())
    grads = torch.autograd.grad(loss, list(wide.values()), allow_unused=True)
    pairs = zip(wide.items(), grads)
    return {
        "o": o.detach(),
        "final": final.detach(),
        **{name: torch.zeros_like(x) if dx is None else dx for (name, x), dx in pairs},
    }


CHANNEL_GATES = {
    "zero": lambda x: 0 * x,
    "weak": lambda x: -0.1 * x,
    "strong": lambda x: -50 * x,
    "mixed": lambda x: -torch.where(torch.rand_like(x) < 0.2, 50 * x, 0.1 * x),
    "huge": lambda x: torch.where(x < 0.1, -1e4, -0.1 * x),
    "reset": lambda x: torch.where(x < 0.1, -torch.inf, -0.1 * x),
    "per token": lambda x: (-x[..., :1]).expand(x.shape),
    "blocks": lambda x: -0.7 - 0.04 * x,  # safe in blocks of eight tokens
    "middling": lambda x: -6 * x,
    "even": lambda x: -7.2 - 0.2 * x,
    "late": lambda x: torch.where(torch.arange(x.shape[1])[:, None, None] < 64, -0.1, -50.0) * x,
    "bfloat16": lambda x: (-x).bfloat16(),
}

FORMS = ("g", "u", "gv")


def inputs(
    size: tuple, dtype: torch.dtype, state: bool, q: Tensor, k: Tensor, **more: Tensor | None
) -> LinearInputs:
    """size: B, T, H, HV, K, V, lengths of packed sequences. v, states and offsets are added."""
    B, T, _, HV, K, V, lengths = size
    N = B if lengths is None else len(lengths)
    return LinearInputs(
        q.to(dtype),
        k.to(dtype),
        torch.randn(B, T, HV, V).to(dtype),
        initial_state=torch.randn(N, HV, K, V) if state else None,
        cu_seqlens=None if lengths is None else offsets(lengths).int(),
        **more,
    )


def erasing(size: tuple) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, keys of norm 1, some of them alike, other vectors of norm 1, and beta from 0 to 2."""
    B, T, H, HV, K, *_ = size
    q, k, other = (torch.randn(B, T, H, K) for _ in range(3))
    k[:, 1::3] = k[:, :1]
    beta = 2 * torch.rand(B, T, HV)
    beta[:, ::7] = 0
    beta[:, 1::7] = 2
    return q, *(torch.nn.functional.normalize(x, dim=-1) for x in (k, other)), beta


def expect(
    family: str,
    terms: LinearInputs,
    do: Tensor | None,
    dfinal: Tensor | None,
    scale: float,
    case: str,
    times: float = 1.0,
    limits: dict[str, float] | None = None,
    absolute: dict[str, float] | None = None,
) -> None:
    """Results and gradients of a family's back end. times: of the usual error; limits and absolute:
    those of single results, the second not relative."""
    backend: Any = importlib.import_module(f"slipstream.kernels.linear.triton.{family}.backend")
    o, final = backend.forward(terms, scale)
    got = {"o": o, "final": final, **backend.backward(terms, do, dfinal, scale)}
    wide = torch.zeros(terms.v.shape) if do is None else do
    for name, x in reference(terms, scale, wide, dfinal).items():
        assert got[name].shape == x.shape
        limit = 2e-6 if terms.q.dtype == torch.float32 else 2e-3
        if got[name].dtype == torch.bfloat16:
            limit = 4e-3
        limit, error = (limits or {}).get(name, limit * times), relative_error(got[name], x)
        if name in (absolute or {}):
            off = (got[name].double() - x).square().mean().sqrt()
            limit, error = (absolute or {})[name], float(off)
        assert error <= limit, f"{family}, {case}: {name} is off by {error:.1e}"
    names = {name for name in DIFFERENTIABLE if getattr(terms, name) is not None}
    assert set(got) == names | {"o", "final"}


def expect_all(family: str, terms: LinearInputs, case: str, **options: Any) -> None:
    """With a gradient of o, and of the final state where there is one of the first."""
    do = torch.randn(terms.v.shape).to(terms.v.dtype)
    dfinal = None if terms.initial_state is None else torch.randn(terms.state_shape)
    expect(family, terms, do, dfinal, terms.q.shape[-1] ** -0.5, case, **options)


def expect_final_alone(family: str, terms: LinearInputs, case: str) -> None:
    """Without a gradient of o."""
    expect(family, terms, None, torch.randn(terms.state_shape), 0.5, f"{case} without do")


def context_terms(
    kind: str,
    T: int,
    sequences: tuple[int, ...] | None,
    rows: int = 2,
    dtype: torch.dtype = torch.float32,
) -> LinearInputs:
    """What ranks share, of a kind of recurrence."""
    B = 1 if sequences else rows
    H, HV, K, V = 1, 2, 16, 12
    if kind in ("gla", "gla of values", "rwkv6", "gv", "iplr"):
        H = 2
    q, k, a = (torch.randn(B, T, H, K) for _ in range(3))
    k, a = (torch.nn.functional.normalize(x, dim=-1) for x in (k, a))
    x, more = -0.1 * torch.rand(B, T, HV, K), {}
    if kind in ("simple_gla", "gated delta"):
        more["g"] = x[..., 0]
    if kind in ("gla", "gla of values", "rwkv6", "kda", "dplr"):
        more["g"] = x
    if kind in ("gla of values", "gv"):
        more["gv"] = x[..., :V].clone()
    if kind == "rwkv6":
        more["u"] = torch.randn(HV, K)
    if kind in ("delta", "gated delta", "kda"):
        more["beta"] = torch.rand(B, T, HV)
    if kind in ("dplr", "iplr"):
        more |= {"a": a.to(dtype), "b": (-torch.rand(B, T, H, 1) * a).to(dtype)}
    N = len(sequences) if sequences else B
    cu = offsets(sequences).int() if sequences else None
    state = torch.randn(N, HV, K, V)
    q, k, v = (x.to(dtype) for x in (q, k, torch.randn(B, T, HV, V)))
    return LinearInputs(q, k, v, **more, initial_state=state, cu_seqlens=cu)
