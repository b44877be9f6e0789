"""The kernels of a model's first training step, compiled side by side.

Each operator compiles its own kernels at once (runtime/parallel_compile.py), but a model calls its
operators one after the other, and their gradients after all of them. So before the first step one
block of each kind and the loss go forward and backward with launches that only compile.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from slipstream.common.checks import autocast_dtype
from slipstream.models import packing, tensor_parallel
from slipstream.models.block import Block, apply_norm, make_norm
from slipstream.nn import Embedding
from slipstream.nn.linear import plain_linear, plain_module
from slipstream.ops.embedding import embedding
from slipstream.runtime import backends, context_parallel
from slipstream.runtime.parallel_compile import compile_kernels

# Parts of parameters' names that are no part of the model: checkpointing, torch.compile, FSDP.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")


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


def compile_blocks(
    model: Any,
    h: Tensor,
    cu_seqlens: Tensor | None,
    positions: Tensor | None,
    context: context_parallel.ContextParallel | None,
    cache: Any,
) -> None:
    """Compiles the blocks before a model's first forward through them, with h [B, T, D]."""
    if torch.compiler.is_compiling() or model.config.consistent:
        return
    if cache is None and _trains(model, h):
        compile_once(model, h, cu_seqlens, positions, context)


def _trains(model: Any, x: Tensor) -> bool:
    """Whether a forward of x is a training step's on a GPU, and no graph is captured."""
    trains = model.training and torch.is_grad_enabled() and x.is_cuda
    trains = trains and not backends.is_fake(x) and not backends.TRACING
    return trains and not torch.cuda.is_current_stream_capturing()


def compile_with_embedding(
    model: Any,
    input_ids: Tensor | None,
    sequences: packing.Sequences | None,
    positions: Tensor | None,
    context: context_parallel.ContextParallel | None,
    cache: Any,
) -> None:
    """compile_once before the embedding of the first step, whose kernel is compiled beside the
    others; input_ids [B, T], positions [1 or B, T]. Later steps, and tables that may do more than
    look up, are left to compile_blocks."""
    if torch.compiler.is_compiling() or "_compiled_for" in model.__dict__ or input_ids is None:
        return
    if cache is not None or model.config.consistent:
        return
    table = model.embed_tokens
    if not _trains(model, input_ids) or type(table) is not Embedding or not plain_module(table):
        return
    weight = table.weight.detach()
    h, cu_seqlens = weight.new_empty(*input_ids.shape, weight.shape[1]), None
    if sequences is not None:
        h, cu_seqlens = sequences.pack(h), sequences.cu_seqlens
        if positions is not None:
            positions = sequences.pack(positions.expand(input_ids.shape[0], -1))
    compile_once(model, h, cu_seqlens, positions, context, lambda: embedding(input_ids, weight))


def compile_once(
    model: Any,
    h: Tensor,
    cu_seqlens: Tensor | None,
    positions: Tensor | None,
    context: context_parallel.ContextParallel | None = None,
    also: Callable[[], object] = lambda: None,
) -> None:
    """Compiles what the blocks launch in a training step, once for each dtype, packed or not.

    Leaves no gradients, and random numbers as they were. A kernel that fails here fails again when
    the step calls it, and says so then. It takes the memory of one block. The model's own blocks do
    not run, so that neither hooks nor collectives of FSDP, DDP or checkpointing do: each rank
    compiles for itself, and ranks with one cache of Triton's compile each kernel once between them.
    Left out are models whose heads are sharded, and the replicas of DataParallel, which last for
    one step. also: what else launches kernels.
    """
    if getattr(model, "_is_replica", False):
        return
    known = model.__dict__.setdefault("_compiled_for", set())
    kind = (h.device, h.dtype, autocast_dtype(h), cu_seqlens is None, context is None)
    if kind in known:
        return
    known.add(kind)
    if tensor_parallel.is_sharded(model):
        return
    loss = _next.loss

    def run() -> None:
        also()
        run_blocks(model, h, cu_seqlens, positions, context)
        if loss is not None:
            x = h.detach().requires_grad_()
            torch.autograd.grad(loss(x), x)

    devices = [h.device] if h.is_cuda else []
    with torch.random.fork_rng(devices), torch.autograd.set_multithreading_enabled(False):
        compile_kernels(run, ())


def run_blocks(
    model: Any,
    h: Tensor,
    cu_seqlens: Tensor | None,
    positions: Tensor | None,
    context: context_parallel.ContextParallel | None,
) -> None:
    """Forward and backward of a block of each kind and of the last norm, with any weights."""
    done, value = set(), None
    for i in range(len(model.layers)):
        kind = repr((model.config.mixer(i), model.config.mlp(i)))
        if kind in done:
            continue
        block = _like(model, i, h)
        x = h.detach().requires_grad_()
        options: Any = {"cu_seqlens": cu_seqlens, "positions": positions, "context": context}
        y, _, made = block.forward(x, value, **options)
        _differentiate(y, x, block)
        if made is None:
            done.add(kind)
        else:  # a first layer, which makes a value for the others
            value = made.detach()
    with torch.device("meta"):
        norm = make_norm(model.config)
    norm = _with_memory(norm, model.norm, h)
    x = h.detach().requires_grad_()
    y = apply_norm(x, norm, model) if model.config.residual_in_fp32 else norm(x)
    _differentiate(y, x, norm)


def _differentiate(y: Tensor, x: Tensor, module: nn.Module) -> None:
    leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
    torch.autograd.grad(y, leaves, torch.empty_like(y), allow_unused=True)


def _like(model: Any, i: int, h: Tensor) -> Block:
    """A block like the model's i-th, on the device of h, with memory of its own."""
    with torch.device("meta"):
        block = Block(model.config, i)
    return _with_memory(block, model.layers[i], h)


def _with_memory(made: Any, like: nn.Module, h: Tensor) -> Any:
    """`made`, from the meta device, with uninitialised memory on h's; dtypes of parameters, and
    which are trained, are those of `like`."""
    own: dict[str, Any] = {}
    for name, p in like.named_parameters():
        # without the names of what wraps modules
        own[".".join(x for x in name.split(".") if x not in _WRAPPERS)] = p
    for prefix, module in made.named_modules():
        for key, x in module._buffers.items():
            if x is not None:
                module._buffers[key] = torch.empty(x.shape, dtype=x.dtype, device=h.device)
        for key, x in module._parameters.items():
            if x is None:
                continue
            p: Any = own.get(f"{prefix}.{key}" if prefix else key)
            # FSDP2 hands out shards in the dtype that activations have
            trained = p is None or p.requires_grad
            dtype = h.dtype if p is None or is_traceable_wrapper_subclass(p) else p.dtype
            mine = torch.empty(x.shape, dtype=dtype, device=h.device)
            module._parameters[key] = nn.Parameter(mine, trained)
    return made.train()
