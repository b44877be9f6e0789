"""Shared by the launches: the tiles of a device, its current stream, strides in wide units."""

import math

import torch
from torch import Tensor

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.triton.tiles import Tiles, choose, family
from slipstream.runtime.backends import INTERPRETED, sm_count
from slipstream.runtime.backends import device_of as device_of
from slipstream.runtime.backends import fp32_dot_precision as fp32_dot_precision
from slipstream.runtime.launch_cache import by_sizes, cache

LOG2E = 1.4426950408889634
# arguments of kernels: strides of q, k and v [B, T, H, D]
STRIDES = tuple(f"stride_{name}{dim}" for name in "qkv" for dim in "bth")


@cache
def tiles_for(
    device: torch.device, D: int, DV: int, bytes_each: int, has_bias: bool = False
) -> tuple[Tiles, int, int]:
    has_bias &= not INTERPRETED
    return choose(family_of(device), D, DV, bytes_each, has_bias)


@cache
def family_of(device: torch.device) -> str:
    if INTERPRETED:
        return "interpreter"
    return family(torch.cuda.get_device_capability(device), hip=bool(torch.version.hip))


def multiprocessors(device: torch.device) -> int:
    return sm_count(device.index if device.type == "cuda" else -1)


def unit_and_strides(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, list[int]]:
    """Strides in units of as many elements as divide them all, at most the 16 bytes of a load."""
    strides = [s for x in (q, k, v) for s in x.stride()[:3]]
    unit = _unit(16 // q.element_size(), *strides)
    return unit, [s // unit for s in strides]


@by_sizes
def _unit(width: int, *strides: int) -> int:
    return math.gcd(width, *strides)


def positive(q: Tensor, options: AttentionOptions) -> tuple[Tensor, AttentionOptions, int]:
    """q and a scale above 0 with the same product, and the sign that went from one to the other."""
    scale = options.scale
    sign = (scale > 0) - (scale < 0)
    return q if sign == 1 else q * sign, options._replace(scale=abs(scale) or 1.0), sign


def to_kernel_layout(
    inputs: AttentionInputs, options: AttentionOptions
) -> tuple[AttentionInputs, AttentionOptions, int]:
    """As the kernels index them, with a positive scale; the sign is taken from q."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in inputs[:3])
    q, options, sign = positive(q, options)
    slopes = inputs.slopes
    optional = (
        None if x is None else x.contiguous() for x in (inputs.sinks, inputs.cu_q, inputs.cu_k)
    )
    sinks, cu_q, cu_k = optional
    inputs = AttentionInputs(
        q,
        k,
        v,
        inputs.g,
        sinks,
        None if slopes is None else slopes.float().contiguous(),
        cu_q,
        cu_k,
        None if inputs.lengths is None else inputs.lengths.contiguous(),
        inputs.seed,
    )
    return inputs, options, sign


def factor_and_cap(options: AttentionOptions) -> tuple[float, float]:
    """As scores.py wants them, in base 2."""
    if options.softcap == 0:
        return LOG2E * options.scale, 0.0
    return 2 * LOG2E * options.scale / options.softcap, LOG2E * options.softcap


def bound(side: int) -> int:
    """A side of the window: beyond every position, and no overflow."""
    return min(max(side, 0), 1 << 30)


def sinks_gradient(sinks: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """The gradient of sinks [H], of launch_delta's base and delta [B, H, T]."""
    p = (LOG2E * sinks.float()[:, None] - base).exp2()
    return -(p * delta).sum((0, 2)).to(sinks.dtype)
