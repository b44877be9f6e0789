"""Messages between ranks for context parallelism, with gradients where there are any; and for
tensor parallelism sums over ranks that each compute a part of the channels.

x = sum_gradients(x, group)      x itself, the same on every rank; backward adds up its gradients
y = sum_parts(y, group)          the sum of the ranks' y, the same on every rank
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from slipstream.runtime import autograd, launch_cache

if TYPE_CHECKING:
    from slipstream.runtime.context_parallel import Share


def all_to_all(x: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    """Starts an exchange. Rank r gets the next sent[r] elements of x, and sends received[r].

    The result may be read after `wait`. A rank that only sends does not wait.
    """
    if launch_cache.of_thread.warmup is not None:  # of one rank: the others are not asked
        return x.new_empty(sum(received))
    run = torch.ops._c10d_functional.all_to_all_single
    return run(x, received, sent, group.group_name)


def all_gather(x: Tensor, ranks: int, group: Any) -> Tensor:
    """Starts an all-gather, as all_to_all does."""
    if launch_cache.of_thread.warmup is not None:
        return x.new_empty(ranks * x.shape[0], *x.shape[1:])
    return torch.ops._c10d_functional.all_gather_into_tensor(x, ranks, group.group_name)


def wait(x: Tensor) -> Tensor:
    """x, once it is there; on a GPU the stream waits, not the host. These three are operators of
    tensors alone, so that calls with them inside are replayed (call_replay.py)."""
    if launch_cache.of_thread.warmup is None:
        torch.ops._c10d_functional.wait_tensor(x)
    return x


class Messages:
    """Tensors on their way between ranks, all in one operation; `wait` before they are read."""

    def __init__(
        self, sent: list[tuple[int, Tensor]], received: list[tuple[int, Tensor]], group: Any
    ) -> None:
        """Starts it. sent, received: contiguous, with the other rank in the group; between two
        ranks in the same order on both."""
        self._sent = sent  # kept until they have been read
        pairs = (dist.isend, sent), (dist.irecv, received)
        operations = [
            dist.P2POp(run, x, group=group, group_peer=rank)
            for run, tensors in pairs
            for rank, x in tensors
            if x.numel() and launch_cache.of_thread.warmup is None
        ]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Waits: on a GPU the stream does, not the host."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], []


class _SumOfRanks(autograd.Function):
    operator = "slipstream::context_sum"

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: "Share") -> Tensor:
        ctx.share = share
        return share.add_up(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, grad: Tensor) -> Any:
        return ctx.share.add_up(grad.clone(memory_format=torch.contiguous_format)), None


class _Gather(autograd.Function):
    operator = "slipstream::context_gather"

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: "Share") -> Tensor:
        ctx.share = share
        return torch.stack(share.gather(x))

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, grad: Tensor) -> Any:
        grad = grad.clone(memory_format=torch.contiguous_format)
        return ctx.share.add_up(grad)[ctx.share.rank], None


class _Tie(autograd.Function):
    operator = "slipstream::context_tie"

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.like = [(y.shape, y.dtype, y.device) for y in others]
        return x.view_as(x)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, grad: Tensor) -> Any:
        return grad, *(torch.zeros(n, dtype=d, device=at) for n, d, at in ctx.like)


def sum_of_ranks(x: Tensor, share: "Share") -> Tensor:
    """Adds x of all ranks, on every rank; gradients that arrive there are added up."""
    return _SumOfRanks.apply(x, share)


def gather(x: Tensor, share: "Share") -> Tensor:
    """The tensors of all ranks [ranks, ...], with gradients.

    Backward is an exchange too, in which every rank has to take part: x has to be tied to inputs
    that want gradients, and a result that the rank's loss depends on to what is returned.
    """
    return _Gather.apply(x, share)


def entry_states(
    change: Tensor, states: Tensor | None, rows: int, share: "Share"
) -> tuple[Tensor | None, Tensor]:
    """The states that this rank's pieces start from, where each element of a state goes its own
    way: h -> decay * h + added. Also what `tie` has to hold.

    Args:
        change: added and decay of the tail's tokens [2, rows, ...], tied to inputs.
        states: those before all sequences, `rows` each; None is zeros.
    """
    changes, before = gather(change, share), None
    for rank in share.earlier:
        added, decay = changes[rank]
        before = added if before is None else decay * before + added
    return share.local_states(states, before, rows), changes


def states_of_pieces(
    x: Tensor, width: int, states: Tensor | None, share: "Share"
) -> tuple[Tensor | None, Tensor | None]:
    """The last `width` inputs before each of this rank's pieces [N, D, width], of x [B, T, D].

    states: those before all sequences; None is zeros. Also returns the tensors that `tie` has to
    hold, or None.
    """
    rows = 1 if share.packed else x.shape[0]
    if not share.crossings.any:
        return share.local_states(states, None, rows), None
    last = x.new_zeros(rows, x.shape[2], width)
    if share.later:
        tail = x[:, max(share.tail_begin, x.shape[1] - width) :].mT
        last = F.pad(tail, (width - tail.shape[2], 0))
    found = gather(tie(last, x), share)
    if not share.earlier:
        return share.local_states(states, None, rows), found
    n = share.pieces[0]
    before = x.new_zeros(rows, x.shape[2], width)
    if states is not None:
        before = states[n * rows : (n + 1) * rows].to(x.dtype)
    for rank in share.earlier:
        count = min(share.tokens_of(rank, n), width)
        before = torch.cat([before[..., count:], found[rank][..., width - count :]], dim=-1)
    return share.local_states(states, before, rows), found


def tie(x: Tensor, *others: Tensor) -> Tensor:
    """Returns x. The backward of `others` then runs wherever that of x does."""
    return _Tie.apply(x, *others)


class HeadShard(NamedTuple):
    """The part of the heads that a rank has."""

    group: Any
    rank: int
    size: int


class _SumOnce(autograd.Function):
    operator = "slipstream::rank_sums"

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, of_gradients: bool) -> Tensor:
        ctx.group, ctx.of_gradients = group, of_gradients
        return x.view_as(x) if of_gradients else _summed(x, group)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, grad: Tensor) -> Any:
        return _summed(grad, ctx.group) if ctx.of_gradients else grad, None, None


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
    return _SumOnce.apply(x, group, True)


def sum_parts(x: Tensor, group: Any) -> Tensor:
    """The sum over all ranks; each rank gets the whole gradient."""
    return _SumOnce.apply(x, group, False)


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
