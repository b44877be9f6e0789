"""Activations of a gate beside what it lets through: in plain torch, and the Triton ones.

y = f(gate) up        dgate = dy up f'(gate)        dup = dy f(gate)        up may be missing: 1

slipstream::_glu and slipstream::_glu_backward are the operators, for tracers; plain calls launch
without them. linear.py has the product that follows.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import numeric_probe
from slipstream.runtime.autograd import needs_autograd
from slipstream.runtime.custom_op import KernelOp, autograd_function
from slipstream.runtime.dispatch import PLAIN, TRITON_OR_EAGER, choose, triton_or_eager
from slipstream.runtime.guarded_launch import Guard, known_failure, plain_gradients


def _squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square()


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# by their names in the operators' schemas
FUNCTIONS = {"silu": F.silu, "gelu": _gelu, "sigmoid": torch.sigmoid, "relu2": _squared_relu}


def glu(gate: Tensor, up: Tensor | None, f: str, impl: str | None) -> Tensor:
    """f(gate) up, of one shape and dtype; no up is 1."""
    return run(gate, up, f, impl_for(gate, f, impl))


def impl_for(gate: Tensor, f: str, impl: str | None) -> str:
    """Those to try, as Selection.impls says."""
    # torch.compile makes one kernel of it and of what is around it
    if impl is None and (not gate.is_cuda or torch.compiler.is_compiling()):
        return "eager"
    return choose(_CANDIDATES, (gate, f), impl, "glu", gate).impls


def run(gate: Tensor, up: Tensor | None, f: str, impl: str) -> Tensor:
    """By one of the implementations that impl_for names."""
    if impl in PLAIN:
        return _eager(gate, up, f)
    if needs_autograd(gate, up):
        return _Glu.apply(gate, up, f, impl)
    return forward(gate, up, f=f, impl=impl)


def _eager(gate: Tensor, up: Tensor | None, f: str) -> Tensor:
    y = FUNCTIONS[f](gate)
    return y if up is None else y * up


def _eager_backward(
    gate: Tensor, up: Tensor | None, dy: Tensor, f: str
) -> tuple[Tensor, Tensor | None]:
    """dgate, dup; in the order of memory."""
    dgate, *dup = plain_gradients(partial(_eager, f=f), (gate, up), [dy])
    return dgate, dup[0] if dup else None


def _unsupported_reason(x: Tensor, f: str) -> str | None:
    if x.dim() == 0 or x.shape[-1] == 0:
        return "there are no features"
    return known_failure(lambda: _kind(x, f), x.device)


_CANDIDATES = triton_or_eager(_unsupported_reason)


def _kind(x: Tensor, f: str) -> KernelKey:
    return ("glu.triton", f, x.dtype, x.shape[-1])


def _mismatch(gate: Tensor, up: Tensor | None, f: str) -> str | None:
    """The probe: rows of the same width."""
    width = gate.shape[-1]
    probe_inputs = {"gate": numeric_probe.random_like(gate, 37, width)}
    probe_inputs |= {"up": None if up is None else numeric_probe.random_like(up, 37, width)}
    return numeric_probe.mismatch(
        lambda t: run(t["gate"], t["up"], f, TRITON_OR_EAGER),
        lambda t: _eager(**t, f=f),
        probe_inputs,
    )


def _forward(gate: Tensor, up: Tensor | None, f: str, impl: str) -> Tensor:
    with _guard(impl, gate, up, f) as usable:
        if usable:
            from slipstream.kernels.pointwise.triton import glu

            return glu.glu(gate, up, f)
    return _eager(gate, up, f).contiguous()


def _backward(dy: Tensor, gate: Tensor, up: Tensor | None, f: str, impl: str) -> list[Tensor]:
    with _guard(impl, gate, up, f) as usable:
        if usable:
            from slipstream.kernels.pointwise.triton import glu

            return [x for x in glu.glu_backward(gate, up, dy, f) if x is not None]
    return [x for x in _eager_backward(gate, up, dy, f) if x is not None]


def _guard(impl: str, gate: Tensor, up: Tensor | None, f: str) -> Guard:
    return Guard(impl, gate.device, lambda: _kind(gate, f), lambda: _mismatch(gate, up, f))


def _forward_fake(gate: Tensor, up: Tensor | None, f: str, impl: str) -> Tensor:
    return gate.new_empty(gate.shape)


def _backward_fake(dy: Tensor, gate: Tensor, up: Tensor | None, f: str, impl: str) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (gate, up) if x is not None]


forward = KernelOp(
    "glu",
    "(Tensor gate, Tensor? up, str f, str impl) -> Tensor",
    _forward,
    _forward_fake,
    replay=True,
)
backward = KernelOp(
    "glu_backward",
    "(Tensor dy, Tensor gate, Tensor? up, str f, str impl) -> Tensor[]",
    _backward,
    _backward_fake,
    replay=True,
)
_Glu = autograd_function(forward, backward, results="y", wrt="gate up")
