"""The gradients of an activation, which is made once more on the way, in place of what came in.

    h = f(gate) up        dgate = dh up f'(gate)        dup = dh f(gate)        up may be missing: 1

One read of gate, up and dh, one write of dgate, dup and h, which takes dh's memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.pointwise.triton.glu import COLUMNS, ELEMENTS, _activation, _rows
from slipstream.runtime.backends import device_of
from slipstream.runtime.launch_cache import cached


@triton.jit(do_not_specialize=["R"])
def glu_bwd_recompute_kernel(
    gate_ptr, up_ptr, dh_ptr, dgate_ptr, dup_ptr, gate_stride, up_stride, R,
    F: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (R / BR * D / BD), a row's blocks one after the other. dh becomes h."""
    # blocks and rows as glu_kernel has them
    ND: tl.constexpr = (D + BD - 1) // BD
    row = ((tl.program_id(0) // ND).to(tl.int64) * BR + tl.arange(0, BR))[:, None]
    o_d = (tl.program_id(0) % ND * BD + tl.arange(0, BD))[None, :]
    m = (row < R) & (o_d < D)
    b_g = tl.load(gate_ptr + row * gate_stride + o_d, mask=m, other=0.0).to(tl.float32)
    p_dh = dh_ptr + row * D + o_d
    b_dh = tl.load(p_dh, mask=m, other=0.0).to(tl.float32)
    # f and f', which become h and dgate as factors come in
    b_h, b_dg = _activation(b_g, F)
    b_dg *= b_dh
    if up_ptr is not None:
        b_u = tl.load(up_ptr + row * up_stride + o_d, mask=m, other=0.0).to(tl.float32)
        b_du = b_dh * b_h  # before up comes into b_h
        tl.store(dup_ptr + row * D + o_d, b_du.to(dup_ptr.dtype.element_ty), mask=m)
        b_h *= b_u
        b_dg *= b_u
    tl.store(dgate_ptr + row * D + o_d, b_dg.to(dgate_ptr.dtype.element_ty), mask=m)
    # the thread that writes an element of h is the one that has read dh there
    tl.store(p_dh, b_h.to(dh_ptr.dtype.element_ty), mask=m)


def glu_bwd_recompute(
    dh: Tensor, gate: Tensor, up: Tensor | None, f: str
) -> tuple[Tensor, Tensor | None]:
    """dgate, dup; dh is contiguous and becomes h."""
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = None if up is None else torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate = _rows(gate)
    up = None if up is None else _rows(up)
    R, D = gate.shape
    BD = min(1 << (D - 1).bit_length(), COLUMNS)
    BR = ELEMENTS // BD
    stride = 0 if up is None else up.stride(0)
    with device_of(gate.device):
        cached(glu_bwd_recompute_kernel)[(-(-R // BR) * -(-D // BD),)](
            gate_ptr=gate,
            up_ptr=up,
            dh_ptr=dh,
            dgate_ptr=dgate,
            dup_ptr=dup,
            gate_stride=gate.stride(0),
            up_stride=stride,
            R=R,
            F=f,
            D=D,
            BR=BR,
            BD=BD,
            num_warps=4,
        )
    return dgate, dup
