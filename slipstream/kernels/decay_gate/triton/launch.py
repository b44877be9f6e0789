"""Launches of the decay gate: no synchronisation, nothing that depends on device values.

Memory beyond results: backward, two numbers a channel for each of P programs.
"""

import math

import torch
from torch import Tensor

from slipstream.kernels.decay_gate.triton.gate import (
    decay_gate_bwd_kernel,
    decay_gate_fwd_kernel,
    decay_gate_sums_kernel,
)
from slipstream.runtime.backends import device_of, sm_count
from slipstream.runtime.launch_cache import cached

# Elements of a tile, and channels of one at most.
ELEMENTS, CHANNELS = 2048, 512
# Programs of backward at a time on each multiprocessor.
PER_PROCESSOR = 8


def forward(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    x, tile = _features_in_row(x), _tile(x)
    g = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    with device_of(x.device):
        cached(decay_gate_fwd_kernel)[(-(-tile["R"] // tile["BR"]), -(-tile["C"] // tile["BC"]))](
            x_ptr=x,
            a_ptr=None if A_log is None else A_log.contiguous(),
            bias_ptr=None if dt_bias is None else dt_bias.contiguous(),
            g_ptr=g,
            stride_b=x.stride(0),
            stride_t=x.stride(1),
            T=x.shape[1],
            lower_bound=lower_bound or 0.0,
            BOUNDED=lower_bound is not None,
            **tile,
            num_warps=4,
        )
    return g


def backward(
    dg: Tensor,
    x: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
) -> list[Tensor]:
    """dx, and those that there are of dA_log and ddt_bias."""
    x, dg, tile = _features_in_row(x), dg.contiguous(), _tile(x)
    C, K = tile["C"], tile["K"]
    blocks = -(-C // tile["BC"])
    most = max(sm_count(x.get_device()) * PER_PROCESSOR // blocks, 1)
    P = min(-(-tile["R"] // tile["BR"]), most)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty(P, 2, C, dtype=torch.float32, device=x.device)
    dA, dbias = (
        None if p is None else torch.empty(p.shape, dtype=p.dtype, device=p.device)
        for p in (A_log, dt_bias)
    )
    with device_of(x.device):
        cached(decay_gate_bwd_kernel)[(P, blocks)](
            dg_ptr=dg,
            x_ptr=x,
            a_ptr=None if A_log is None else A_log.contiguous(),
            bias_ptr=None if dt_bias is None else dt_bias.contiguous(),
            dx_ptr=dx,
            partial_ptr=partial,
            stride_b=x.stride(0),
            stride_t=x.stride(1),
            T=x.shape[1],
            lower_bound=lower_bound or 0.0,
            BOUNDED=lower_bound is not None,
            **tile,
            num_warps=4,
        )
        if dA is not None or dbias is not None:
            BK = 1 << (K - 1).bit_length()
            cached(decay_gate_sums_kernel)[(x.shape[2],)](
                partial_ptr=partial,
                da_ptr=dA,
                dbias_ptr=dbias,
                P=P,
                C=C,
                K=K,
                BP=max(min(ELEMENTS // BK, 256), 1),
                BK=BK,
                num_warps=4,
            )
    return [t for t in (dx, dA, dbias) if t is not None]


def _features_in_row(x: Tensor) -> Tensor:
    """x with the channels of a token in a row; its batch and tokens may be anywhere."""
    in_row = x.stride(-1) == 1 and (x.dim() == 3 or x.stride(2) == x.shape[3])
    return x if in_row else x.contiguous()


def _tile(x: Tensor) -> dict[str, int]:
    C = math.prod(x.shape[2:])
    BC = min(1 << (C - 1).bit_length(), CHANNELS)
    K = C // x.shape[2]
    return {"R": x.shape[0] * x.shape[1], "C": C, "K": K, "BR": ELEMENTS // BC, "BC": BC}
