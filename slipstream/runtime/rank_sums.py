"""Tensor parallelism: sums over ranks that each compute a part of the channels.

x = sum_gradients(x, group)      x itself, the same on every rank; backward adds up its gradients
y = sum_parts(y, group)          the sum of the ranks' y, the same on every rank
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.runtime import autograd, launch_cache


class HeadShard(NamedTuple):
    """The part of the heads that a rank has."""

    group: Any
    rank: int
    size: int


class _SumGradients(autograd.Function):
    operator = "slipstream::rank_sums"

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, grad: Tensor) -> Any:
        return _summed(grad, ctx.group), None


class _SumParts(autograd.Function):
    operator = "slipstream::rank_sums"

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _summed(x, group)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, grad: Tensor) -> Any:
        return grad, None


class _GatherLast(autograd.Function):
    operator = "slipstream::rank_sums"

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: HeadShard) -> Tensor:
        ctx.shard, ctx.width = shard, x.shape[-1]
        parts = [torch.empty_like(x) for _ in range(shard.size)]
        if launch_cache.of_thread.warmup is None:
            dist.all_gather(parts, x.contiguous(), group=shard.group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, grad: Tensor) -> Any:
        return grad.narrow(-1, ctx.shard.rank * ctx.width, ctx.width).contiguous(), None


class _NormOfParts(autograd.Function):
    """x / sqrt(mean(x^2) + eps), x in parts; float32 or wider."""

    operator = "slipstream::rank_sums"

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, shard: HeadShard) -> Tensor:
        size = x.shape[-1] * shard.size
        mean = _summed(x.square().sum(-1, keepdim=True), shard.group) / size
        scale = torch.rsqrt(mean + eps)
        ctx.group, ctx.size = shard.group, size
        autograd.save(ctx, x, scale)
        return x * scale

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, grad: Tensor) -> Any:
        x, scale = saved
        along = _summed((grad * x).sum(-1, keepdim=True), ctx.group) / ctx.size
        return scale * (grad - x * scale.square() * along), None, None


def sum_gradients(x: Tensor, group: Any) -> Tensor:
    """x, whose gradient is that of all ranks: each has that of its own part."""
    return _SumGradients.apply(x, group)


def sum_parts(x: Tensor, group: Any) -> Tensor:
    """The sum over all ranks; each rank gets the whole gradient."""
    return _SumParts.apply(x, group)


def gather_last(x: Tensor, shard: HeadShard) -> Tensor:
    """[..., n] of each rank -> [..., ranks n], whose gradient is the same on every rank."""
    return _GatherLast.apply(x, shard)


def norm_of_parts(x: Tensor, eps: float, shard: HeadShard) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, of which each rank has a part, in float32
    unless x is wider."""
    return _NormOfParts.apply(x if x.dtype == torch.float64 else x.float(), eps, shard)


def _summed(x: Tensor, group: Any) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    if launch_cache.of_thread.warmup is not None:  # of one rank: the others are not asked
        return x
    dist.all_reduce(x, group=group)
    return x
