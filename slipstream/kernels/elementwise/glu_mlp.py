"""The three products of a gated MLP as one Function, for a kernel that makes the activation where
the sums of gate and up are.

    gate = x W_gate^T    up = x W_up^T    h = f(gate) up    y = h W_down^T + bias

    dh = dy W_down       dgate = dh up f'(gate)             dup = dh f(gate)
    dx = dgate W_gate + dup W_up          dW_gate = dgate^T x          dW_up = dup^T x
    dW_down = dy^T h

x, gate and up are kept, as two linear layers and glu_linear.py would; h is made again in the
backward, by the kernel of glu_linear.py. Only for layers that the kernel of sm_90 takes: others are
better off as they are. Of few rows torch makes the products, and the kernel of glu.py what follows.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.elementwise import glu, glu_linear
from slipstream.runtime import custom_op, dispatch, numeric_probe, size_ladder
from slipstream.runtime.autograd import Function, Saved, as_base, once_differentiable, save
from slipstream.runtime.backends import sm90_unsupported, sm_count
from slipstream.runtime.guarded_launch import Guard, known_failure

IMPLS = f"sm90|{dispatch.TRITON_OR_EAGER}"
_DTYPES = (torch.bfloat16, torch.float16)
# Where TMA reads and writes rows, in bytes.
_ALIGNED = 16


def unsupported_reason(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, f: str) -> str | None:
    """Why the kernel does not take x [..., D], however many rows that has, with weights gate, up
    [F, D] and down [D', F]."""
    if x.dtype not in _DTYPES or {w.dtype for w in (gate, up, down)} != {x.dtype}:
        return "they multiply 16-bit numbers of one dtype"
    if gate.shape != up.shape or x.shape[-1] != gate.shape[1] or down.shape[1] != gate.shape[0]:
        return "the sizes do not fit"
    if gate.shape[0] * 2 % _ALIGNED:
        return f"TMA wants rows of the result at multiples of 16 bytes, not {gate.shape[0]} columns"
    for name, w in (("gate", gate), ("up", up)):
        if not w.is_contiguous() or w.data_ptr() % _ALIGNED or w.shape[1] * 2 % _ALIGNED:
            return f"TMA wants rows of {name} at multiples of 16 bytes"
    return sm90_unsupported(x) or known_failure(lambda: _kind(x, f), x.device)


def impls_for(x: Tensor, gate: Tensor, processors: int | None = None) -> str:
    """Those to try: the kernel where it has as many tiles as there are multiprocessors.

    processors: multiprocessors of the device, None: as it says.
    """
    rows, tiles = x.numel() // max(x.shape[-1], 1), -(-gate.shape[0] // 256)
    if processors is None:
        processors = sm_count(x.get_device())
    if -(-rows // 128) * tiles >= processors:
        return IMPLS
    # torch.compile makes one kernel of the activation and of what is around it
    return "eager" if torch.compiler.is_compiling() else dispatch.TRITON_OR_EAGER


def gated_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, bias: Tensor | None, f: str, impl: str
) -> Tensor:
    """x [..., D] -> [..., D'], with gradients; what unsupported_reason says nothing against."""
    return _GatedMLP.apply(x, gate, up, down, bias, f, impl)


class _GatedMLP(Function):
    operator = "slipstream.nn.GatedMLP"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down: Tensor,
        bias: Tensor | None,
        f: str,
        impl: str,
    ) -> Tensor:
        rows = _aligned(x)
        gate, up, h = _call(rows, gate_weight, up_weight, f, impl)
        # nothing that no gradient wants
        needs_x, *needs = ctx.needs_input_grad[:3]
        weights = (gate_weight, up_weight) if needs_x else (None, None)
        save(ctx, rows if any(needs) else None, gate, up, *weights, down)
        ctx.f, ctx.impl, ctx.shape = f, impl, x.shape
        return as_base(F.linear(h, down, bias).view(*x.shape[:-1], down.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, gate_weight, up_weight, down = saved
        needs_x, needs_gate, needs_up, needs_down, needs_bias = ctx.needs_input_grad[:5]
        rows = dy.reshape(-1, dy.shape[-1])
        h = rows @ down
        # dh becomes h
        dgate, dup = glu_linear._call(h, gate, up, f=ctx.f, impl=ctx.impl.removeprefix("sm90|"))
        dx = (dgate @ gate_weight).addmm_(dup, up_weight).view(ctx.shape) if needs_x else None
        return (
            dx,
            dgate.t() @ x if needs_gate else None,
            dup.t() @ x if needs_up else None,
            rows.t() @ h if needs_down else None,
            rows.sum(0) if needs_bias else None,
            None,
            None,
        )


def _aligned(x: Tensor) -> Tensor:
    """x as rows that TMA reads."""
    x = x.reshape(-1, x.shape[-1])
    x = x if x.is_contiguous() else x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNED else x


def _products(x: Tensor, gate: Tensor, up: Tensor, f: str, impl: str) -> tuple[Tensor, ...]:
    """gate, up and h [M, F] of x [M, D]."""
    first, _, others = impl.partition("|")
    if first == "sm90":
        with Guard(impl, x.device, lambda: _kind(x, f), lambda: _mismatch(x, f)) as usable:
            if usable:
                from slipstream.kernels.elementwise.sm90 import glu as launch

                return launch.products(x, gate, up, f)
        return _products(x, gate, up, f, others)
    z, u = F.linear(x, gate), F.linear(x, up)
    return z, u, glu.forward(z, u, f=f, impl=impl)


def _kind(x: Tensor, f: str) -> KernelKey:
    return ("glu_products.sm90", f, x.dtype)


def _mismatch(like: Tensor, f: str) -> str | None:
    """The probe: edges in every direction."""
    inputs = {name: numeric_probe.random_like(like, 136, 72) / 8 for name in ("gate", "up")}
    inputs |= {"x": numeric_probe.random_like(like, 200, 72)}

    def run(t: numeric_probe.Given, impl: str) -> tuple[Tensor, ...]:
        return _products(t["x"], t["gate"], t["up"], f, impl)

    return numeric_probe.mismatch(
        lambda t: run(t, "sm90"), lambda t: run(t, "eager"), inputs, gradients=False
    )


def _at_sizes(args: tuple) -> Iterator[tuple]:
    """Of one row, and of as many as the kernel takes."""
    x, gate, up, f, _ = args
    for rows in (1, 128 * sm_count(x.get_device())):
        other = size_ladder.resized(x, rows)
        assert other is not None
        yield other, gate, up, f, impls_for(other, gate)


_call = custom_op.DirectCall(_products, at_sizes=_at_sizes)
