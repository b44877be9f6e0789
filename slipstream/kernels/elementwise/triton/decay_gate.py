"""The decay gate, forward and backward; decay_gate.py has the formula.

    dz = -dg r sigmoid(z)                             bounded: dz = dg lower_bound s (1 - s) r
    dA_log = sum dg g                                 bounded: sum dz z, with s = sigmoid(r z)
    dx = dz        ddt_bias = sum dz

R tokens of C channels, K of each of the HV heads. A program has every P-th tile of BR tokens and BC
channels, forward one; primitives/device.py adds up what programs sum over tokens.

Nothing is compiled again for another number of heads: C and the strides of x arrive in units of
UNIT, 16 where that divides all of them, which tells the compiler that rows are aligned.

Memory beyond results: backward, two numbers a channel for each of P programs.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.primitives import device
from slipstream.runtime import backends, launch_cache


@triton.jit
def _parameters(a_ptr, bias_ptr, o_c, m_c, K, BC: tl.constexpr):
    """r and dt_bias of channels."""
    b_r, b_bias = tl.full([BC], 1.0, tl.float32), tl.zeros([BC], tl.float32)
    if a_ptr is not None:
        b_r = tl.exp(tl.load(a_ptr + o_c // K, mask=m_c, other=0.0).to(tl.float32))
    if bias_ptr is not None:
        b_bias += tl.load(bias_ptr + o_c, mask=m_c, other=0.0).to(tl.float32)
    return b_r[None, :], b_bias[None, :]


@triton.jit
def _rows(x_ptr, o_r, stride_b, stride_t, T):
    """Where the rows of x begin."""
    return x_ptr + (o_r // T).to(tl.int64) * stride_b + (o_r % T).to(tl.int64) * stride_t


@triton.jit(do_not_specialize=["units_b", "units_t", "units_c", "T", "R", "K"])
def decay_gate_kernel(
    dg_ptr, x_ptr, a_ptr, bias_ptr, g_ptr, dx_ptr, partial_ptr, units_b, units_t, units_c, T, R, K,
    lower_bound, UNIT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Grid (P, C / BC). x [B, T, C], a [HV], bias [C]. g [R, C]; or of dg [R, C] dx and partial
    [P, 2, C]: of ddt_bias and dA_log by channel."""
    C = units_c * UNIT
    i_p, P = tl.program_id(0), tl.num_programs(0)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    b_r, b_bias = _parameters(a_ptr, bias_ptr, o_c, o_c < C, K, BC)
    # each thread adds up its own elements, and all of them once, at the end
    b_dbias, b_da = tl.zeros([BR, BC], tl.float32), tl.zeros([BR, BC], tl.float32)
    for i in range(i_p, tl.cdiv(R, BR), P):
        o_r = i * BR + tl.arange(0, BR)
        m = (o_r < R)[:, None] & (o_c < C)[None, :]
        # tokens times channels may be more than 32 bits
        o = o_r[:, None].to(tl.int64) * C + o_c[None, :]
        p_x = _rows(x_ptr, o_r, units_b * UNIT, units_t * UNIT, T)[:, None] + o_c[None, :]
        b_z = tl.load(p_x, mask=m, other=0.0).to(tl.float32) + b_bias
        # the bounded gate over its bound, or what softplus has for its derivative
        b_s = tl.sigmoid(b_r * b_z if BOUNDED else b_z)
        if dg_ptr is None:
            b_g = lower_bound * b_s if BOUNDED else -b_r * device.softplus(b_z)
            tl.store(g_ptr + o, b_g, mask=m)
        else:
            b_dg = tl.load(dg_ptr + o, mask=m, other=0.0).to(tl.float32)
            if BOUNDED:
                b_dz = b_dg * lower_bound * b_s * (1 - b_s) * b_r
                b_da += b_dz * b_z
            else:
                b_dz = -b_dg * b_r * b_s
                b_da -= b_dg * b_r * device.softplus(b_z)
            b_dbias += b_dz
            tl.store(dx_ptr + o, b_dz.to(dx_ptr.dtype.element_ty), mask=m)
    if dg_ptr is not None:
        p_partial = partial_ptr + i_p * 2 * C + o_c
        tl.store(p_partial, tl.sum(b_dbias, 0), mask=o_c < C)
        tl.store(p_partial + C, tl.sum(b_da, 0), mask=o_c < C)


def forward(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    x = _features_in_row(x)
    g = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _run(x, A_log, dt_bias, lower_bound, _sizes(x).row_blocks, g_ptr=g)
    return g


def backward(
    dg: Tensor, x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> list[Tensor]:
    """dx, and those that there are of dA_log and ddt_bias."""
    x, dg = _features_in_row(x), dg.contiguous()
    sizes = _sizes(x)
    C, K = sizes.C, sizes.K
    # four at a time on each multiprocessor
    max_programs = max(backends.sm_count(x.get_device()) * 4 // sizes.blocks, 1)
    P = min(sizes.row_blocks, max_programs)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty(P, 2, C, dtype=torch.float32, device=x.device)
    _run(x, A_log, dt_bias, lower_bound, P, dg_ptr=dg, dx_ptr=dx, partial_ptr=partial)
    dA, dbias = (
        None if p is None else torch.empty(p.shape, dtype=p.dtype, device=p.device)
        for p in (A_log, dt_bias)
    )
    if dA is not None and K > 1:
        by_channel = torch.empty_like(partial[0, 1])
        device.add_partial_sums(partial, [dbias, by_channel])
        dA.copy_(by_channel.view(-1, K).sum(1).view(dA.shape))
    elif dA is not None or dbias is not None:
        device.add_partial_sums(partial, [dbias, dA])
    return [t for t in (dx, dA, dbias) if t is not None]


def _run(
    x: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    programs: int,
    **tensors: Tensor,
) -> None:
    """None what is not among the tensors."""
    sizes = _sizes(x)
    names = ("dg_ptr", "g_ptr", "dx_ptr", "partial_ptr")
    launch_cache.cached(decay_gate_kernel)[programs, sizes.blocks](
        x_ptr=x,
        a_ptr=None if A_log is None else A_log.contiguous(),
        bias_ptr=None if dt_bias is None else dt_bias.contiguous(),
        **(dict.fromkeys(names) | tensors),
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
    # a tile of 2048 elements
    BC = 32 if K == 1 else 512
    return _Sizes(x.shape[0] * x.shape[1], C, K, 2048 // BC, BC)
