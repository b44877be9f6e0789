"""The oracle of the selective scan: its recurrence token by token.

    dt_t = softplus(delta_t + delta_bias)                        or delta_t + delta_bias
    h_t[d, n] = exp(dt_t[d] A[d, n]) h_{t-1}[d, n] + dt_t[d] B_t[n] u_t[d]
    y_t[d] = (sum_n C_t[n] h_t[d, n] + D[d] u_t[d]) silu(z_t[d])

Plain differentiable torch in float32, or float64 for float64 inputs. Cost: T steps of O(B D N).
Symbols: B batch, T tokens, D channels, N numbers a channel's state has, G groups of B and C.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common.varlen import check_cu_seqlens_values
from slipstream.kernels.selective_scan.inputs import ScanInputs, compute_dtype


def selective_scan_reference(inputs: ScanInputs, delta_softplus: bool) -> tuple[Tensor, Tensor]:
    """y [B, T, D] in u's dtype and the final state [S, D, N]."""
    u, cu_seqlens, state = inputs.u, inputs.cu_seqlens, inputs.initial_state
    dtype = compute_dtype(u)
    if cu_seqlens is None:
        y, final = _run(inputs, delta_softplus)
        return y.to(u.dtype), final
    check_cu_seqlens_values(cu_seqlens, u.shape[1])
    outputs = []
    for s, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        cut = {x: getattr(inputs, x) for x in ("u", "delta", "B", "C", "z")}
        cut = {name: None if x is None else x[:, begin:end] for name, x in cut.items()}
        first = None if state is None else state[s : s + 1]
        outputs.append(_run(inputs._replace(**cut, initial_state=first), delta_softplus))
    if not outputs:
        return torch.empty_like(u), u.new_zeros(0, *inputs.A.shape, dtype=dtype)
    y = torch.cat([y for y, _ in outputs], dim=1).to(u.dtype)
    return y, torch.cat([final for _, final in outputs])


def _run(inputs: ScanInputs, delta_softplus: bool) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(inputs.u)
    u, delta, A = (x.to(dtype) for x in inputs[:3])
    each = u.shape[2] // inputs.B.shape[2]
    B, C = (x.to(dtype).repeat_interleave(each, 2) for x in (inputs.B, inputs.C))  # [B, T, D, N]
    if inputs.delta_bias is not None:
        delta = delta + inputs.delta_bias.to(dtype)
    if delta_softplus:
        delta = F.softplus(delta)
    state = inputs.initial_state
    h = u.new_zeros(u.shape[0], *A.shape) if state is None else state.to(dtype)
    outputs = []
    for t in range(u.shape[1]):
        dt = delta[:, t, :, None]
        h = (dt * A).exp() * h + dt * B[:, t] * u[:, t, :, None]
        outputs.append((h * C[:, t]).sum(-1))
    y = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(u)
    if inputs.D is not None:
        y = y + inputs.D.to(dtype) * u
    if inputs.z is not None:
        y = y * F.silu(inputs.z.to(dtype))
    return y, h
