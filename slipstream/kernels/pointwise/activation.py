"""Activations of a gate beside what it lets through: in plain torch, and the Triton ones."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.core import guard, probe
from slipstream.core.machine import Kind
from slipstream.core.plan import OR_PLAIN
from slipstream.kernels.launching import choose_impl, is_triton


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


FUNCTIONS = {"silu": F.silu, "gelu": _gelu, "sigmoid": torch.sigmoid, "relu2": _squared_relu}


def glu(gate: Tensor, up: Tensor | None, f: str, impl: str | None) -> Tensor:
    """f(gate) up, of one shape and dtype; no up is 1."""
    impl = choose_impl(impl, gate, _refuses, f)
    return _Glu.apply(gate, up, f, impl) if is_triton(impl) else _plain(gate, up, f)


def _plain(gate: Tensor, up: Tensor | None, f: str) -> Tensor:
    y = FUNCTIONS[f](gate)
    return y if up is None else y * up


def _plain_backward(
    gate: Tensor, up: Tensor | None, dy: Tensor, f: str
) -> tuple[Tensor, Tensor | None]:
    def run() -> tuple[Tensor, ...]:
        leaves = [x.detach().clone().requires_grad_() for x in (gate, up) if x is not None]
        y = _plain(leaves[0], leaves[1] if up is not None else None, f)
        return torch.autograd.grad(y, leaves, dy)

    found = guard.apart(run, dy.device)
    return found[0], found[1] if up is not None else None


def _refuses(x: Tensor, f: str) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile makes its own kernel of it"
    if x.dim() == 0 or x.shape[-1] == 0:
        return "there are no features"
    return guard.objection(lambda: _kind(x, f), x.device)


def _kind(x: Tensor, f: str) -> Kind:
    return ("glu.triton", f, x.dtype, x.shape[-1])


def _mismatch(gate: Tensor, up: Tensor | None, f: str) -> str | None:
    """The probe: rows of the same width."""
    width = gate.shape[-1]
    made = {"gate": probe.fresh(gate, 37, width)}
    made |= {"up": None if up is None else probe.fresh(up, 37, width)}
    return probe.mismatch(
        lambda t: _Glu.apply(t["gate"], t["up"], f, OR_PLAIN), lambda t: _plain(**t, f=f), made
    )


def _attempt(name: str, plain: Any, args: tuple, gate: Tensor, up: Tensor | None, impl: str) -> Any:
    f = args[-1]

    def run(*args: Any) -> Any:
        from slipstream.kernels.pointwise.triton import glu

        return getattr(glu, name)(*args)

    return guard.attempt(
        lambda: _kind(gate, f),
        gate.device,
        run,
        None if impl == "triton" else plain,
        args,
        lambda: _mismatch(gate, up, f),
    )


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, f: str, impl: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.f, ctx.impl = f, impl
        return _attempt("glu", _plain, (gate, up, f), gate, up, impl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        args = (gate, up, dy, ctx.f)
        return *_attempt("glu_backward", _plain_backward, args, gate, up, ctx.impl), None, None
