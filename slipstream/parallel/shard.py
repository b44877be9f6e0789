"""Between a whole batch and the tokens of one rank."""

from typing import TypeVar

from torch import Tensor

from slipstream.common import checks
from slipstream.runtime.context_parallel import ContextParallel

Batch = TypeVar("Batch", Tensor, dict[str, Tensor])


def shard(batch: Batch, context: ContextParallel) -> Batch:
    """This rank's tokens of a batch that every rank has.

    Args:
        batch: [B, T, ...], or a dict of such tensors, T the tokens of all ranks.
        context: who has which tokens.

    Returns:
        Views [B, tokens here, ...].

    Raises:
        ValueError: T is not the number of tokens of the context, or no multiple of its ranks, or
            several rows where sequences are packed.
        TypeError: no tensor, or no context.
    """
    _expect_context(context)
    if isinstance(batch, dict):
        return {name: _shard(name, x, context) for name, x in batch.items()}
    return _shard("batch", batch, context)


def _shard(name: str, x: Tensor, context: ContextParallel) -> Tensor:
    checks.expect_tensor(name, x)
    if x.dim() < 2:
        raise ValueError(f"{name}: want [B, T, ...], got shape {tuple(x.shape)}")
    if context.cu_seqlens is not None and x.shape[0] != 1:
        raise ValueError(f"{name}: want batch size 1, its sequences are packed, got {x.shape[0]}")
    begin, end = context.bounds(x.shape[1])
    return x[:, begin:end]


def _expect_context(context: object) -> None:
    if not isinstance(context, ContextParallel):
        raise TypeError(f"context: want a ContextParallel, got {type(context).__name__}")


def unshard(x: Tensor, context: ContextParallel) -> Tensor:
    """All ranks' tokens, on every rank, with gradients: what arrives there is added up.

    Args:
        x: this rank's tokens [B, tokens here, ...].
        context: who has which tokens.

    Returns:
        [B, T, ...].

    Raises:
        ValueError: the context says another number of tokens. TypeError: no tensor.

    Cost: each rank gets the tokens of all others.
    """
    _expect_context(context)
    checks.expect_tensor("x", x)
    if x.dim() < 2:
        raise ValueError(f"x: want [B, T, ...], got shape {tuple(x.shape)}")
    return context.share(x.shape[1]).gather_tokens(x)
