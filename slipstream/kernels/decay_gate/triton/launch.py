"""Launches of the decay gate: no synchronisation, nothing that depends on device values.

Memory beyond results: backward, two numbers a channel for each of P programs.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.decay_gate.triton.gate import decay_gate_kernel
from slipstream.kernels.primitives.partial_sums import add_partial_sums
from slipstream.runtime.backends import device_of, sm_count
from slipstream.runtime.launch_cache import cached

# Elements of a tile, and its channels where a head has many or one gate.
ELEMENTS, CHANNELS, HEADS = 2048, 512, 32
# Programs of backward at a time on each multiprocessor.
PER_PROCESSOR = 4


def forward(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    x = _features_in_row(x)
    g = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _run(x, A_log, dt_bias, lower_bound, _sizes(x).row_blocks, g=g)
    return g


def backward(
    dg: Tensor,
    x: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
) -> list[Tensor]:
    """dx, and those that there are of dA_log and ddt_bias."""
    x, dg = _features_in_row(x), dg.contiguous()
    sizes = _sizes(x)
    C, K = sizes.C, sizes.K
    max_programs = max(sm_count(x.get_device()) * PER_PROCESSOR // sizes.blocks, 1)
    P = min(sizes.row_blocks, max_programs)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty(P, 2, C, dtype=torch.float32, device=x.device)
    _run(x, A_log, dt_bias, lower_bound, P, dg=dg, dx=dx, partial=partial)
    dA, dbias = (
        None if p is None else torch.empty(p.shape, dtype=p.dtype, device=p.device)
        for p in (A_log, dt_bias)
    )
    if dA is not None and K > 1:
        by_channel = torch.empty_like(partial[0, 1])
        add_partial_sums(partial, [dbias, by_channel])
        dA.copy_(by_channel.view(-1, K).sum(1).view(dA.shape))
    elif dA is not None or dbias is not None:
        add_partial_sums(partial, [dbias, dA])
    return [t for t in (dx, dA, dbias) if t is not None]


def _run(
    x: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    programs: int,
    *,
    dg: Tensor | None = None,
    g: Tensor | None = None,
    dx: Tensor | None = None,
    partial: Tensor | None = None,
) -> None:
    sizes = _sizes(x)
    with device_of(x.device):
        cached(decay_gate_kernel)[programs, sizes.blocks](
            dg_ptr=dg,
            x_ptr=x,
            a_ptr=None if A_log is None else A_log.contiguous(),
            bias_ptr=None if dt_bias is None else dt_bias.contiguous(),
            g_ptr=g,
            dx_ptr=dx,
            partial_ptr=partial,
            lower_bound=lower_bound or 0.0,
            BOUNDED=lower_bound is not None,
            **sizes.arguments(x),
            num_warps=4,
        )


def _features_in_row(x: Tensor) -> Tensor:
    """x with the channels of a token in a row; its batch and tokens may be anywhere."""
    in_row = x.stride(-1) == 1 and (x.dim() == 3 or x.stride(2) == x.shape[3])
    return x if in_row else x.contiguous()


class _Sizes(NamedTuple):
    """R tokens of C channels, K of a head; a tile of BR by BC of them."""

    R: int
    C: int
    K: int
    BR: int
    BC: int

    @property
    def row_blocks(self) -> int:
        return -(-self.R // self.BR)

    @property
    def blocks(self) -> int:
        return -(-self.C // self.BC)

    def arguments(self, x: Tensor) -> dict[str, int]:
        b, t = x.stride(0), x.stride(1)
        unit = 16 if self.K > 1 and all(n % 16 == 0 for n in (b, t, self.C)) else 1
        units = {"units_b": b // unit, "units_t": t // unit, "units_c": self.C // unit}
        sizes = {"T": x.shape[1], "R": self.R, "K": self.K, "BR": self.BR, "BC": self.BC}
        return {**units, **sizes, "UNIT": unit}


def _sizes(x: Tensor) -> _Sizes:
    C = math.prod(x.shape[2:])
    K = C // x.shape[2]
    BC = HEADS if K == 1 else CHANNELS
    return _Sizes(x.shape[0] * x.shape[1], C, K, ELEMENTS // BC, BC)
