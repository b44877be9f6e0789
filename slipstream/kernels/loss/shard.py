"""Cross entropy of a vocabulary in shards, one a rank of a process group, each with its columns.

    lse = log of the sum over ranks of exp(lse of a rank's columns)
    loss = (1 - s) (lse - z[target]) + s (lse - sum(z) / V) + z_loss lse^2

Three numbers a row go between ranks: the largest lse of a rank, and then in one sum exp(lse -
largest), z[target], which is with one rank only, and sum(z). The gradient of a rank's logits is its
own. With the linear layer before it, what is known of hidden's gradient is a rank's share, and
they are summed over ranks; weight's is its own. Collectives are not traced by torch.compile.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.kernels.loss.reference import LossInputs, reduced
from slipstream.runtime import numeric_probe
from slipstream.runtime.autograd import (
    Function,
    Saved,
    once_differentiable,
    refuse_transforms,
    save,
)
from slipstream.runtime.kernel_pair import guarded
from slipstream.runtime.token_ids import expect_ids


class Shard(NamedTuple):
    """Columns `first` to `first + count` of `size`, of the ranks of `group`."""

    first: int
    count: int
    size: int
    group: Any

    def sum(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        dist.all_reduce(x, op, group=self.group)
        return x


class Columns(NamedTuple):
    """The sums of each row over a rank's columns: lse, z[target] or 0, sum(z); float32 or float64
    [N]."""

    lse: Tensor
    hit: Tensor
    z_sum: Tensor


def equal_shards(count: int, group: Any) -> Shard:
    """Every rank has `count` columns."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return Shard(rank * count, count, ranks * count, group)


def cross_entropy(
    logits: Tensor, target: Tensor, options: LossInputs, shard: Shard, reduction: str, impl: str
) -> Tensor:
    """logits [N, count], target [N] of the whole vocabulary -> loss [N] or []."""
    expect_ids("target", target, shard.size, options.ignore_index)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    refuse_transforms(_Rows.operator, (logits,))
    return reduced(_Rows.apply(logits, target, options, shard, impl), target, options, reduction)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: LossInputs,
    shard: Shard,
    reduction: str,
    impl: str,
) -> Tensor:
    """hidden [N, D] is the same on every rank; weight [count, D] and bias [count] are a rank's."""
    expect_ids("target", target, shard.size, options.ignore_index)
    refuse_transforms(_LinearRows.operator, (hidden, weight, bias))
    rows = _LinearRows.apply(hidden, weight, bias, target, options, shard, impl)
    return reduced(rows, target, options, reduction)


def _to_compute_dtype(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _z(logits: Tensor, options: LossInputs) -> Tensor:
    z = _to_compute_dtype(logits) * options.logit_scale
    return options.softcap * torch.tanh(z / options.softcap) if options.softcap else z


def _local(target: Tensor, options: LossInputs, shard: Shard) -> tuple[Tensor, Tensor]:
    """The column of each row's target here, and whether it is here."""
    local = target - shard.first
    inside = (target != options.ignore_index) & (local >= 0) & (local < shard.count)
    return torch.where(inside, local, 0), inside


def columns(
    logits: Tensor, target: Tensor, options: LossInputs, shard: Shard, impl: str
) -> Columns:
    return _guarded("_columns", eager_columns, impl, logits, target, options, shard)


def _columns(logits: Tensor, target: Tensor, options: LossInputs, shard: Shard) -> Columns:
    from slipstream.kernels.loss.triton import launch

    lse, hit, z_sum = (
        torch.zeros(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(3)
    )
    columns_of_rank = launch.Shard(shard.first, shard.size, z_sum)
    launch.cross_entropy(logits, target, options, loss=hit, lse=lse, shard=columns_of_rank)
    return Columns(lse, hit, z_sum)


def eager_columns(logits: Tensor, target: Tensor, options: LossInputs, shard: Shard) -> Columns:
    z, (local, inside) = _z(logits, options), _local(target, options, shard)
    hit = torch.where(inside, z.gather(1, local[:, None])[:, 0], 0)
    return Columns(torch.logsumexp(z, -1), hit, z.sum(-1))


def combined(
    c: Columns, target: Tensor, options: LossInputs, shard: Shard
) -> tuple[Tensor, Tensor]:
    """loss and lse of the whole vocabulary, [N]."""
    live = target != options.ignore_index
    lse = torch.where(live, c.lse, 0)
    top = shard.sum(lse.clone(), dist.ReduceOp.MAX)
    top = torch.where(top.isinf(), 0, top)
    sums = shard.sum(torch.stack([torch.exp(lse - top), c.hit, c.z_sum]))
    lse = top + sums[0].log()
    s = options.label_smoothing
    loss = lse - (1 - s) * sums[1] + options.z_loss * lse.square()
    if s:
        loss = loss - s * sums[2] / shard.size
    return torch.where(live, loss, 0), lse


def dlogits(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    options: LossInputs,
    shard: Shard,
    dloss: Tensor,
    impl: str,
    out: Tensor,
) -> Tensor:
    """The gradient of a rank's logits, in `out`, which may be the logits."""
    args = logits, target, lse, options, shard, dloss, out
    return _guarded("_dlogits", eager_dlogits, impl, *args)


def _dlogits(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    options: LossInputs,
    shard: Shard,
    dloss: Tensor,
    out: Tensor,
) -> Tensor:
    from slipstream.kernels.loss.triton import launch

    columns_of_rank = launch.Shard(shard.first, shard.size)
    launch.cross_entropy(
        logits,
        target,
        options,
        lse=lse,
        grad=out,
        weight=dloss,
        has_lse=True,
        shard=columns_of_rank,
    )
    return out


def eager_dlogits(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    options: LossInputs,
    shard: Shard,
    dloss: Tensor,
    out: Tensor,
) -> Tensor:
    z, (local, inside) = _z(logits, options), _local(target, options, shard)
    d = (z - lse[:, None]).exp_().mul_((1 + 2 * options.z_loss * lse)[:, None])
    d -= options.label_smoothing / shard.size
    hit = torch.where(inside, options.label_smoothing - 1, 0).to(d.dtype)
    d.scatter_add_(1, local[:, None], hit[:, None])
    if options.softcap:
        d *= 1 - (z / options.softcap).square()
    d *= (dloss * options.logit_scale)[:, None]
    return out.copy_(d.masked_fill_((target == options.ignore_index)[:, None], 0))


def _guarded(name: str, plain: Callable, impl: str, logits: Tensor, *args: Any) -> Any:
    """A rank whose compilers fail goes on alone in plain torch: the collectives are the same."""
    dtype, classes, device = logits.dtype, logits.shape[1], logits.device
    kind = ("cross_entropy.shard", dtype, classes)
    mismatch = partial(_mismatch, dtype, classes, device)
    kernel = f"{__name__}:{name}"
    return guarded(impl, device, kernel, plain, (logits, *args), lambda: kind, mismatch)


def _mismatch(dtype: torch.dtype, classes: int, device: torch.device) -> str | None:
    """The probe: the second of two shards, every option on, one row ignored."""
    options, shard = (
        LossInputs(-100, 0.1, 20.0, 1e-3, 0.9),
        Shard(classes, classes, 2 * classes, None),
    )
    logits = torch.randn(9, classes, device=device).to(dtype)
    target, dloss = torch.randint(0, 2 * classes, (9,), device=device), torch.rand(9, device=device)
    target[:4] = classes + target[:4] % classes
    target[4] = -100
    live = target != -100
    with torch.no_grad():
        pairs = [f(logits, target, options, shard) for f in (_columns, eager_columns)]
        lse = pairs[1].lse + 1
        grads = [
            f(logits, target, lse, options, shard, dloss, torch.empty_like(logits))
            for f in (_dlogits, eager_dlogits)
        ]
    for name, x, y in (*zip(Columns._fields, *pairs), ("gradient", *grads)):
        error = numeric_probe.relative_error(x[live], y[live])
        if not error < 2e-2:
            return f"{name} of a shard is off by {error:.1e} of its size"
    return None


class _Rows(Function):
    operator = "slipstream::cross_entropy"

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, options: LossInputs, shard: Shard, impl: str
    ) -> Tensor:
        target = target.contiguous()
        loss, lse = combined(columns(logits, target, options, shard, impl), target, options, shard)
        save(ctx, logits, target, lse)
        ctx.call_options = options, shard, impl
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dloss: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, lse = saved
        options, shard, impl = ctx.call_options
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        dloss = dloss.contiguous()
        return dlogits(logits, target, lse, options, shard, dloss, impl, out), *[None] * 4


class _LinearRows(Function):
    """Logits are made a chunk of rows at a time, again in backward; lse is kept."""

    operator = "slipstream::linear_cross_entropy"

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        options: LossInputs,
        shard: Shard,
        impl: str,
    ) -> Tensor:
        target = target.contiguous()
        column_sums = [
            columns(logits, target[rows], options, shard, impl)
            for rows, logits in _chunks(hidden, weight, bias)
        ]
        if not column_sums:
            column_sums = [Columns(*(_to_compute_dtype(hidden.new_empty(0)) for _ in range(3)))]
        all_columns = Columns(*(torch.cat(x) for x in zip(*column_sums)))
        loss, lse = combined(all_columns, target, options, shard)
        save(ctx, hidden, weight, bias, target, lse)
        ctx.call_options = options, shard, impl
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dloss: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, lse = saved
        options, shard, impl = ctx.call_options
        dloss = dloss.expand(target.shape).contiguous()
        dhidden = torch.zeros_like(hidden, dtype=_to_compute_dtype(hidden[:0]).dtype)
        dweight = torch.zeros_like(weight)
        dbias = None if bias is None else torch.zeros_like(_to_compute_dtype(bias))
        for rows, logits in _chunks(hidden, weight, bias):
            args = (target[rows], lse[rows], options, shard, dloss[rows], impl)
            d = dlogits(logits, *args, out=logits)
            dhidden[rows] = d @ weight
            dweight.addmm_(d.t(), hidden[rows])
            if dbias is not None:
                dbias += d.sum(0, dtype=dbias.dtype)
        shard.sum(dhidden)
        dbias = None if dbias is None or bias is None else dbias.to(bias.dtype)
        return dhidden.to(hidden.dtype), dweight, dbias, *[None] * 4


def _chunks(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """Slices of rows, and their logits."""
    step = max((1 << 26) // max(weight.shape[0], 1), 1)
    linear: Callable = torch.nn.functional.linear
    for i in range(0, hidden.shape[0], step):
        yield slice(i, i + step), linear(hidden[i : i + step], weight, bias)
