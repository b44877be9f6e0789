"""The kernels of a model's first training step, compiled side by side.

Each operator compiles its own kernels at once (runtime/parallel_compile.py), but a model calls its
operators one after the other, and their gradients after all of them. So before the first step one
block of each kind and the loss go forward and backward with launches that only compile.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from slipstream.common.checks import autocast_dtype
from slipstream.nn import decoding
from slipstream.nn.linear import plain_linear, plain_module
from slipstream.runtime import backends
from slipstream.runtime.backends import is_fake
from slipstream.runtime.parallel_compile import compile_kernels


class _Next(threading.local):
    def __init__(self) -> None:
        # in each thread's own dictionary from the start: torch.compile guards on its being there
        self.loss: Callable[[Tensor], Tensor] | None = None


_next = _Next()


@contextmanager
def before_loss(
    model: Any, labels: Tensor | None, num_items: Tensor | int | None
) -> Iterator[None]:
    """For a forward whose hidden states go to a language model's loss: the kernels of the loss are
    compiled beside those of the blocks."""
    outer, _next.loss = _next.loss, loss_of(model, labels, num_items)
    try:
        yield
    finally:
        _next.loss = outer


def loss_of(
    model: Any, labels: Tensor | None, num_items: Tensor | int | None
) -> Callable[[Tensor], Tensor] | None:
    """A loss of hidden states [B, T, D] by the same kernels; None if there is none, or the head may
    do more than multiply."""
    head = model.lm_head
    if labels is None or not plain_linear(head) or head.weight._backward_hooks:
        return None
    return lambda h: model._loss(h, labels.new_zeros(h.shape[:2]), num_items)


def forward_of(
    model: Any, h: Tensor, cu_seqlens: Tensor | None, positions: Tensor | None, alone: bool
) -> AbstractContextManager:
    """The context for a model's forward through its blocks; h [B, T, D] is the first one's input.

    alone: there are neither a cache nor other ranks.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    trains = model.training and torch.is_grad_enabled()
    alone = alone and trains and h.is_cuda and not is_fake(h) and not backends.TRACING
    if alone and not torch.cuda.is_current_stream_capturing():
        compile_once(model, h, cu_seqlens, positions)
    return decoding.shared_tables()


def compile_once(
    model: Any, h: Tensor, cu_seqlens: Tensor | None, positions: Tensor | None
) -> None:
    """Compiles what the blocks launch in a training step, once for each dtype, packed or not.

    Leaves no gradients, and random numbers as they were. A kernel that fails here fails again when
    the step calls it, and says so then. Blocks are left out whose modules or parameters have hooks,
    or whose parameters are no plain tensors, and all where there are several ranks: their calls may
    do more than compute. So are the replicas of DataParallel, which last for one step.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    if getattr(model, "_is_replica", False):
        return
    known = model.__dict__.setdefault("_compiled_for", set())
    kind = (h.device, h.dtype, autocast_dtype(h), cu_seqlens is None)
    if kind in known:
        return
    known.add(kind)
    blocks = {}
    for i, block in enumerate(model.layers):
        # a first layer may be of its own kind: others take a value that it makes
        names = model.config.mixer(i), model.config.mlp(i), i == 0
        hooked = any(p._backward_hooks for p in block.parameters())
        if not hooked and all(plain_module(x) for x in block.modules()):
            blocks.setdefault(repr(names), block)

    loss = _next.loss

    def run() -> None:
        value = None
        for block in blocks.values():
            x = h.detach().requires_grad_()
            # not the call, which may checkpoint: the kernels are the same
            y, _, made = block.forward(x, value, cu_seqlens=cu_seqlens, positions=positions)
            value = value if made is None else made.detach()
            leaves = [x, *(p for p in block.parameters() if p.requires_grad)]
            torch.autograd.grad(y, leaves, torch.empty_like(y), allow_unused=True)
        if loss is not None:
            x = h.detach().requires_grad_()
            torch.autograd.grad(loss(x), x)

    devices = [h.device] if h.is_cuda else []
    with torch.random.fork_rng(devices), torch.autograd.set_multithreading_enabled(False):
        compile_kernels(run, ())
