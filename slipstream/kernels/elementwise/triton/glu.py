"""An activation of a gate, times what it lets through.

    y = f(gate) up        dgate = dy up f'(gate)        dup = dy f(gate)        up may be missing: 1

    silu   g s(g)                s: the logistic function
    gelu   g s(2 a (g + b g^3))  its tanh form, a = sqrt(2 / pi), b = 0.044715
    relu2  max(g, 0)^2

R rows of F features; gate and up may lie in rows of a wider tensor.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.runtime import launch_cache


@triton.jit
def _activation(b_g, F: tl.constexpr):
    """f and its derivative."""
    if F == "relu2":
        b_r = tl.maximum(b_g, 0.0, propagate_nan=tl.PropagateNan.ALL)
        b_f, b_df = b_r * b_r, 2 * b_r
    elif F == "gelu":
        # tanh(x) = 2 s(2 x) - 1: one exponential; 1.5957 is 2 sqrt(2 / pi), 0.134145 is 3 b
        b_s = tl.sigmoid(1.5957691216057308 * (b_g + 0.044715 * b_g * b_g * b_g))
        b_f = b_g * b_s
        b_inner = 1.5957691216057308 * (1 + 0.134145 * b_g * b_g)
        b_df = b_s + b_f * (1 - b_s) * b_inner
    else:
        b_s = tl.sigmoid(b_g)
        b_f, b_df = b_s, b_s * (1 - b_s)
        if F == "silu":
            b_f, b_df = b_g * b_s, b_s * (1 + b_g * (1 - b_s))
    return b_f, b_df


@triton.jit(do_not_specialize=["R"])
def glu_kernel(
    gate_ptr, up_ptr, dy_ptr, y_ptr, dgate_ptr, dup_ptr, gate_stride, up_stride, R,
    F: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (R / BR * D / BD), a row's blocks one after the other. y, or of dy dgate and dup, and
    then y too if it is given, which may be dy."""
    ND: tl.constexpr = (D + BD - 1) // BD
    # one grid axis: the others end at 65535 programs; 64 bits, as R D may be more than 2^31
    row = ((tl.program_id(0) // ND).to(tl.int64) * BR + tl.arange(0, BR))[:, None]
    o_d = (tl.program_id(0) % ND * BD + tl.arange(0, BD))[None, :]
    m = (row < R) & (o_d < D)
    b_g = tl.load(gate_ptr + row * gate_stride + o_d, mask=m, other=0.0).to(tl.float32)
    # forward does not read b_df: the compiler leaves it out
    b_f, b_df = _activation(b_g, F)
    if dy_ptr is not None:
        b_dy = tl.load(dy_ptr + row * D + o_d, mask=m, other=0.0).to(tl.float32)
        # products in float32, rounded once each
        b_dg = b_dy * b_df
        if up_ptr is not None:
            b_up = tl.load(up_ptr + row * up_stride + o_d, mask=m, other=0.0).to(tl.float32)
            b_dg *= b_up
            b_du = b_dy * b_f
            tl.store(dup_ptr + row * D + o_d, b_du.to(dup_ptr.dtype.element_ty), mask=m)
            if y_ptr is not None:
                b_f *= b_up
        tl.store(dgate_ptr + row * D + o_d, b_dg.to(dgate_ptr.dtype.element_ty), mask=m)
    elif up_ptr is not None:
        b_f *= tl.load(up_ptr + row * up_stride + o_d, mask=m, other=0.0).to(tl.float32)
    if y_ptr is not None:
        # where y is dy the thread that writes an element is the one that has read it
        tl.store(y_ptr + row * D + o_d, b_f.to(y_ptr.dtype.element_ty), mask=m)


def glu(gate: Tensor, up: Tensor | None, f: str) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _run(gate, up, f, y_ptr=y)
    return y


def glu_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, f: str
) -> tuple[Tensor, Tensor | None]:
    """dgate, dup"""
    dy = dy.contiguous()
    dgate = torch.empty_like(dy)
    dup = None if up is None else torch.empty_like(dy)
    _run(gate, up, f, dy_ptr=dy, dgate_ptr=dgate, dup_ptr=dup)
    return dgate, dup


def glu_bwd_recompute(
    dy: Tensor, gate: Tensor, up: Tensor | None, f: str
) -> tuple[Tensor, Tensor | None]:
    """dgate, dup; dy is contiguous and becomes y."""
    dgate = torch.empty_like(dy)
    dup = None if up is None else torch.empty_like(dy)
    _run(gate, up, f, dy_ptr=dy, y_ptr=dy, dgate_ptr=dgate, dup_ptr=dup)
    return dgate, dup


def _run(gate: Tensor, up: Tensor | None, f: str, **tensors: Tensor | None) -> None:
    """None what is not among the tensors."""
    gate = _rows(gate)
    up = None if up is None else _rows(up)
    R, D = gate.shape
    # narrow rows share a program: it has as many elements whatever the width, eight a thread
    BD = min(1 << (D - 1).bit_length(), 1024)
    BR = 2048 // BD
    stride = 0 if up is None else up.stride(0)
    launch_cache.cached(glu_kernel)[(-(-R // BR) * -(-D // BD),)](
        gate_ptr=gate,
        up_ptr=up,
        **(dict.fromkeys(("dy_ptr", "y_ptr", "dgate_ptr", "dup_ptr")) | tensors),
        gate_stride=gate.stride(0),
        up_stride=stride,
        R=R,
        F=f,
        D=D,
        BR=BR,
        BD=BD,
        num_warps=8,
    )


def _rows(x: Tensor) -> Tensor:
    """[R, D], a view if the rows are evenly spaced and their elements adjacent."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x.reshape(-1, x.shape[-1])
