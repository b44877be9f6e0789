"""A training step whose loss and gradients are CUDA graphs: for batches that the host is slower to
launch than the device to compute.

torch.cuda.make_graphed_callables captures them too, but leaves three faults to its caller: the
gradients of a second backward are added to memory that it has just written over, a loss that is
kept changes with the next batch, and so do the activations of one whose backward has yet to come.
"""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.runtime.autograd import Function, Saved, once_differentiable

# Calls before the capture: kernels are compiled in the first, recorded in the second.
WARMUP = 3


class _Captured(NamedTuple):
    """forward, backward: graphs. inputs, loss, dloss, grads: their tensors."""

    forward: Any
    backward: Any
    inputs: dict[str, Tensor]
    loss: Tensor
    dloss: Tensor
    grads: list[Tensor | None]


class CapturedLoss:
    """The loss of a model in training, and its gradients, each a CUDA graph.

        loss = CapturedLoss(model)
        loss(input_ids=ids, labels=ids).backward()
        optimizer.step()

    The first call with inputs of a shape runs the model a few times, without effect on its
    gradients, and captures it; later ones replay that. Everything else, such as the optimizer,
    clipping and accumulation of gradients, is as without graphs. Inputs that are no tensors count
    as a part of the shape: give what changes from batch to batch as a tensor. A call runs as it is
    written on a CPU, in evaluation, without gradients, past `max_graphs` shapes, and with a list
    or a dict among its inputs.

    Args:
        model: returns an object with a `loss`, as transformers' models do; on one device, without
            hooks that have to run in every step, and without packed sequences (cu_seqlens), whose
            number is a shape of its own.
        max_graphs: shapes whose graphs are kept, with the memory of a step each.

    Raises:
        RuntimeError: in a backward, if another batch has run since.

    Cost: the memory of the activations stays taken between steps, and one set of gradients beside
    those of the parameters, which are copied from it.
    """

    def __init__(self, model: nn.Module, max_graphs: int = 1) -> None:
        self.model, self.max_graphs = model, max_graphs
        self._captured: dict[tuple, _Captured] = {}
        self._pool: Any = None
        self.runs = 0  # of any graph's forward: they share their memory

    def __call__(self, **inputs: Any) -> Tensor:
        tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        if not self._takes(tensors):
            return self.model(**inputs).loss
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        key = self._key(inputs, parameters)
        try:
            found = self._captured.get(key)
        except TypeError:  # of what has no hash, such as a list
            return self.model(**inputs).loss
        if found is None:
            if len(self._captured) >= self.max_graphs:
                return self.model(**inputs).loss
            found = self._captured[key] = self._capture(inputs, tensors, parameters)
        return _Replay.apply(self, found, tensors, *parameters)

    def _takes(self, tensors: dict[str, Tensor]) -> bool:
        return (
            self.model.training
            and torch.is_grad_enabled()
            and bool(tensors)
            and all(x.is_cuda and not x.requires_grad for x in tensors.values())
            and not torch.cuda.is_current_stream_capturing()
        )

    def _key(self, inputs: dict[str, Any], parameters: list[nn.Parameter]) -> tuple:
        """The key of the calls that one graph can replay."""
        given = (
            (name, x.shape, x.dtype, x.device) if isinstance(x, Tensor) else (name, x)
            for name, x in inputs.items()
        )
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        return *given, *autocast, *(p.data_ptr() for p in parameters)

    def _capture(
        self, inputs: dict[str, Any], tensors: dict[str, Tensor], parameters: list[nn.Parameter]
    ) -> _Captured:
        own = {name: x.clone() for name, x in tensors.items()}
        given = {**inputs, **own}

        def forward() -> Tensor:
            return self.model(**given).loss

        def backward(loss: Tensor, dloss: Tensor) -> list[Tensor | None]:
            return [*torch.autograd.grad(loss, parameters, dloss, allow_unused=True)]

        # The cache is of weights that autocast casts once, before a replay: each has to cast them.
        autocast = torch.autocast(
            "cuda",
            torch.get_autocast_dtype("cuda"),
            torch.is_autocast_enabled("cuda"),
            cache_enabled=False,
        )
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        with autocast, torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(WARMUP):
                loss = forward()
                backward(loss, torch.ones_like(loss))
            first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with self._recorded(first):
                loss = forward()
            dloss = torch.ones_like(loss)
            with self._recorded(second):
                grads = backward(loss, dloss)
        # detached: autograd's nodes would have the parameters' gradients wait for this stream
        return _Captured(first, second, own, loss.detach(), dloss, grads)

    def _recorded(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager:
        # on the stream of the calls before, to which autograd has bound the parameters' gradients;
        # thread_local: what other threads do meanwhile, such as a data loader, is no error
        stream = torch.cuda.current_stream()
        return torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local")


class _Replay(Function):
    operator = "slipstream.training.CapturedLoss"

    @staticmethod
    def forward(
        ctx: Any,
        owner: CapturedLoss,
        captured: _Captured,
        tensors: dict[str, Tensor],
        *parameters: nn.Parameter,
    ) -> Tensor:
        for name, x in tensors.items():
            captured.inputs[name].copy_(x)
        captured.forward.replay()
        owner.runs += 1
        ctx.owner, ctx.captured, ctx.run = owner, captured, owner.runs
        return captured.loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, dloss: Tensor) -> tuple[Tensor | None, ...]:
        captured: _Captured = ctx.captured
        if ctx.owner.runs != ctx.run:
            raise RuntimeError(
                "CapturedLoss: another batch ran since this loss, whose activations are gone; call "
                "backward before the next batch"
            )
        captured.dloss.copy_(dloss)
        captured.backward.replay()
        # Copies: the gradients lie in the graphs' pool, where the next forward writes over them.
        grads = [None if x is None else torch.empty_like(x) for x in captured.grads]
        used = [(x, y) for x, y in zip(grads, captured.grads) if x is not None and y is not None]
        into, found = map(list, zip(*used))
        torch._foreach_copy_(into, found)  # pyright: ignore[reportPrivateImportUsage]
        return None, None, None, *grads
