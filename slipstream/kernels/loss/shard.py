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

from slipstream.common import checks
from slipstream.common.linear_rows import ClassifierInputs
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.loss.eager import LossInputs, reduced
from slipstream.runtime import autograd, kernel_pair, token_ids


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


class RankRows(NamedTuple):
    """Rows of logits [N, count] of a rank's columns; target [N] is of the whole vocabulary."""

    logits: Tensor
    target: Tensor
    options: LossInputs
    shard: Shard

    @property
    def z(self) -> Tensor:
        z, cap = checks.widen(self.logits) * self.options.logit_scale, self.options.softcap
        return cap * torch.tanh(z / cap) if cap else z

    @property
    def columns(self) -> tuple[Tensor, Tensor]:
        """The column of each row's target here, and whether it is here."""
        column = self.target - self.shard.first
        inside = (self.target != self.options.ignore_index) & (column >= 0)
        inside &= column < self.shard.count
        return torch.where(inside, column, 0), inside


def cross_entropy(
    logits: Tensor, target: Tensor, options: LossInputs, shard: Shard, reduction: str, impl: str
) -> Tensor:
    """logits [N, count], target [N] of the whole vocabulary -> loss [N] or []."""
    token_ids.expect_ids("target", target, shard.size, options.ignore_index)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    autograd.refuse_transforms(_Rows.operator, (logits,))
    return reduced(_Rows.apply(logits, target, options, shard, impl), target, options, reduction)


def linear_cross_entropy(
    inputs: ClassifierInputs, options: LossInputs, shard: Shard, reduction: str, impl: str
) -> Tensor:
    """hidden [N, D] is the same on every rank; weight [count, D] and bias [count] are a rank's."""
    token_ids.expect_ids("target", inputs.target, shard.size, options.ignore_index)
    autograd.refuse_transforms(_LinearRows.operator, inputs[:3])
    rows = _LinearRows.apply(*inputs, options, shard, impl)
    return reduced(rows, inputs.target, options, reduction)


def columns(t: RankRows, impl: str) -> Columns:
    return _guarded("_columns", eager_columns, impl, t)


def _columns(t: RankRows) -> Columns:
    from slipstream.kernels.loss.triton import cross_entropy as launch

    lse, hit, z_sum = (
        torch.zeros(t.target.shape, dtype=torch.float32, device=t.logits.device) for _ in range(3)
    )
    shard = launch.Shard(t.shard.first, t.shard.size, z_sum)
    launch.cross_entropy(*t[:3], loss=hit, lse=lse, shard=shard)
    return Columns(lse, hit, z_sum)


def eager_columns(t: RankRows) -> Columns:
    z, (column, inside) = t.z, t.columns
    hit = torch.where(inside, z.gather(1, column[:, None])[:, 0], 0)
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


def dlogits(t: RankRows, lse: Tensor, dloss: Tensor, out: Tensor, impl: str) -> Tensor:
    """The gradient of a rank's logits, in `out`, which may be the logits."""
    return _guarded("_dlogits", eager_dlogits, impl, t, lse, dloss, out)


def _dlogits(t: RankRows, lse: Tensor, dloss: Tensor, out: Tensor) -> Tensor:
    from slipstream.kernels.loss.triton import cross_entropy as launch

    shard = launch.Shard(t.shard.first, t.shard.size)
    launch.cross_entropy(*t[:3], lse=lse, grad=out, weight=dloss, has_lse=True, shard=shard)
    return out


def eager_dlogits(t: RankRows, lse: Tensor, dloss: Tensor, out: Tensor) -> Tensor:
    z, (column, inside), options = t.z, t.columns, t.options
    d = (z - lse[:, None]).exp_().mul_((1 + 2 * options.z_loss * lse)[:, None])
    d -= options.label_smoothing / t.shard.size
    hit = torch.where(inside, options.label_smoothing - 1, 0).to(d.dtype)
    d.scatter_add_(1, column[:, None], hit[:, None])
    if options.softcap:
        d *= 1 - (z / options.softcap).square()
    d *= (dloss * options.logit_scale)[:, None]
    return out.copy_(d.masked_fill_((t.target == options.ignore_index)[:, None], 0))


def _guarded(name: str, plain: Callable, impl: str, t: RankRows, *args: Any) -> Any:
    """A rank whose compilers fail goes on alone in plain torch: the collectives are the same."""
    dtype, classes, device = t.logits.dtype, t.logits.shape[1], t.logits.device
    mismatch = partial(_mismatch, dtype, classes, device)
    return kernel_pair.guarded(
        impl,
        device,
        f"{__name__}:{name}",
        plain,
        (t, *args),
        lambda: _kind(dtype, classes),
        mismatch,
    )


def _kind(dtype: torch.dtype, classes: int) -> KernelKey:
    return ("cross_entropy.shard", dtype, classes)


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
        t = RankRows(logits, target, options, shard)
        pairs = [f(t) for f in (_columns, eager_columns)]
        lse = pairs[1].lse + 1
        grads = [f(t, lse, dloss, torch.empty_like(logits)) for f in (_dlogits, eager_dlogits)]
    for name, x, y in (*zip(Columns._fields, *pairs), ("gradient", *grads)):
        error = kernel_pair.relative_error(x[live], y[live])
        if not error < 2e-2:
            return f"{name} of a shard is off by {error:.1e} of its size"
    return None


class _Rows(autograd.Function):
    operator = "slipstream::cross_entropy"

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        logits, target, options, shard, impl = args
        t = RankRows(logits, target.contiguous(), options, shard)
        loss, lse = combined(columns(t, impl), t.target, options, shard)
        autograd.save(ctx, logits, t.target, lse)
        ctx.call_options = options, shard, impl
        return loss

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, dloss: Tensor) -> tuple[Tensor | None, ...]:
        (logits, target, lse), (*options, impl) = saved, ctx.call_options
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        t = RankRows(logits, target, *options)
        return dlogits(t, lse, dloss.contiguous(), out, impl), *[None] * 4


class _LinearRows(autograd.Function):
    """Logits are made a chunk of rows at a time, again in backward; lse is kept."""

    operator = "slipstream::linear_cross_entropy"

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        hidden, weight, bias, target, options, shard, impl = args
        target = target.contiguous()
        column_sums = [
            columns(RankRows(logits, target[rows], options, shard), impl)
            for rows, logits in _chunks(hidden, weight, bias)
        ]
        if not column_sums:
            column_sums = [Columns(*(checks.widen(hidden.new_empty(0)) for _ in range(3)))]
        all_columns = Columns(*(torch.cat(x) for x in zip(*column_sums)))
        loss, lse = combined(all_columns, target, options, shard)
        autograd.save(ctx, hidden, weight, bias, target, lse)
        ctx.call_options = options, shard, impl
        return loss

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, dloss: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, lse = saved
        options, shard, impl = ctx.call_options
        dloss = dloss.expand(target.shape).contiguous()
        dhidden = torch.zeros_like(hidden, dtype=checks.wide_dtype(hidden))
        dweight = torch.zeros_like(weight)
        dbias = None if bias is None else torch.zeros_like(checks.widen(bias))
        for rows, logits in _chunks(hidden, weight, bias):
            t = RankRows(logits, target[rows], options, shard)
            d = dlogits(t, lse[rows], dloss[rows], logits, impl)
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
