"""Activations of a gate beside what it lets through: in plain torch, and the Triton ones.

y = f(gate) up        dgate = dy up f'(gate)        dup = dy f(gate)        up may be missing: 1

slipstream::_glu and slipstream::_glu_backward are the operators, for tracers; plain calls launch
without them. glu_linear.py has the product that follows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import autograd, custom_op, dispatch


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
    return dispatch.choose(_CANDIDATES, (gate, f), impl, "glu", gate).impls


def run(gate: Tensor, up: Tensor | None, f: str, impl: str) -> Tensor:
    """By one of the implementations that impl_for names."""
    if impl in dispatch.PLAIN:
        return _eager(gate, up, f)
    if autograd.needs_autograd(gate, up):
        return _Glu.apply(gate, up, f, impl)
    return forward(gate, up, f=f, impl=impl)


def _eager(gate: Tensor, up: Tensor | None, f: str) -> Tensor:
    y = FUNCTIONS[f](gate)
    return y if up is None else y * up


def _kind(gate: Tensor, f: str) -> KernelKey:
    return ("glu.triton", f, gate.dtype, gate.shape[-1])


def _unsupported_reason(gate: Tensor, f: str) -> str | None:
    if gate.dim() == 0 or gate.shape[-1] == 0:
        return "there are no features"
    return None


_LAUNCH = "slipstream.kernels.elementwise.triton.glu"
_OPTIONS = "str f, str impl"
forward = custom_op.KernelOp(
    "glu",
    f"(Tensor gate, Tensor? up, {_OPTIONS}) -> Tensor",
    kernel=f"{_LAUNCH}:glu",
    plain=_eager,
    kind=_kind,
    # rows of the same width
    probe={"gate": (37, 0), "up": (37, 0)},
    replay=True,
)
_Glu = forward.with_gradient(
    f"(Tensor dy, Tensor gate, Tensor? up, {_OPTIONS}) -> Tensor[]",
    f"{_LAUNCH}:glu_backward",
    results="y",
    wrt="gate up",
)
_CANDIDATES = forward.candidates(_unsupported_reason)
