"""The formula of each operator around the linear family, under its own name, in any dtype.

Those of the linear family are slipstream/kernels/linear/reference.py and recurrences.py here.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.elementwise.token_shift import shift_reference
from slipstream.kernels.selective_scan.inputs import ScanInputs
from slipstream.kernels.selective_scan.reference import selective_scan_reference
from slipstream.tools.catalog import Sample, flat

EPS = 1e-5


def attention_reference(q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor) -> Tensor:
    """visible [B or 1, T, S] -> o [B, T, H, DV], with nothing but a scale."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    score = torch.einsum("bthd,bshd->bhts", q, k) * scale
    score = score.masked_fill(~visible[:, None], float("-inf"))
    top = score.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    p = (score - top).exp()
    p = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    return torch.einsum("bhts,bshd->bthd", p, v)


def visibility(
    q_position: Tensor, k_position: Tensor, window: tuple[int, int], k_length: Tensor | None
) -> Tensor:
    """q_position [..., T], k_position [S], k_length [..., 1, 1] of real keys -> [..., T, S]."""
    age = q_position[..., :, None] - k_position
    left, right = window
    seen = torch.ones_like(age, dtype=torch.bool)
    if left >= 0:
        seen = seen & (age <= left)
    if right >= 0:
        seen = seen & (age >= -right)
    return seen if k_length is None else seen & (k_position < k_length)


def has_formula(row: Sample) -> bool:
    return hasattr(sys.modules[__name__], row.op)


def wanted(row: Sample, args: dict[str, Any]) -> list[Tensor]:
    return flat(getattr(sys.modules[__name__], row.op)(**args, **row.options))


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Any:
    B, C = (x[:, :, None] if x.dim() == 3 else x for x in (B, C))
    inputs = ScanInputs(u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens)
    return selective_scan_reference(inputs, delta_softplus)


def token_shift(
    x: Tensor, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Any:
    return shift_reference(x, initial_state, cu_seqlens)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    window_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    key_lengths: Tensor | None = None,
) -> Tensor:
    """Sequence by sequence."""
    if cu_seqlens is not None:
        bounds = list(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]))
        parts = [(q[:, a:b], k[:, a:b], v[:, a:b]) for a, b in bounds]
        if key_lengths is not None:
            parts = [(q[:, a:b], k[n : n + 1], v[n : n + 1]) for n, (a, b) in enumerate(bounds)]
        joined = 1
    else:
        parts = [(q[n : n + 1], k[n : n + 1], v[n : n + 1]) for n in range(q.shape[0])]
        joined = 0
    right = 0 if causal else -1 if window_size is None else window_size - 1
    window = (-1 if window_size is None else window_size - 1, right)
    outputs = []
    for n, (qn, kn, vn) in enumerate(parts):
        if key_lengths is not None:
            kn, vn = kn[:, : key_lengths[n]], vn[:, : key_lengths[n]]
        S, T = kn.shape[1], qn.shape[1]
        if S == 0:
            outputs.append(vn.new_zeros(1, T, q.shape[2], v.shape[3]))
            continue
        seen = visibility(torch.arange(S - T, S), torch.arange(S), window, None)
        outputs.append(attention_reference(qn, kn, vn, q.shape[-1] ** -0.5, seen[None]))
    return torch.cat(outputs, dim=joined)
