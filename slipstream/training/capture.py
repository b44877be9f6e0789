"""A training step whose loss and gradients are CUDA graphs: for batches that the host is slower to
launch than the device to compute.

torch.cuda.make_graphed_callables captures them too, but leaves three faults to its caller: the
gradients of a second backward are added to memory that it has just written over, a loss that is
kept changes with the next batch, and so do the activations of one whose backward has yet to come.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.runtime.autograd import Function, Saved, once_differentiable

# Calls before the capture: kernels are compiled in the first, recorded in the second.
WARMUP = 3


class Graph:
    """A CUDA graph. `make` fills the tensors that a replay fills again."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, make: Callable[[], Any], pool: Any) -> Any:
        # of the stream of the calls before, to which autograd has bound the parameters' gradients;
        # thread_local: what other threads do meanwhile, such as a data loader, is no error
        with torch.cuda.graph(
            self._graph,
            pool=pool,
            stream=torch.cuda.current_stream(),
            capture_error_mode="thread_local",
        ):
            return make()

    def replay(self) -> None:
        self._graph.replay()


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

        with _without_autocast_cache(), self._stream():
            for _ in range(WARMUP):
                loss = forward()
                backward(loss, torch.ones_like(loss))
            first, second = Graph(), Graph()
            loss = first.capture(forward, self._pool)
            dloss = torch.ones_like(loss)
            grads = second.capture(lambda: backward(loss, dloss), self._pool)
        # detached: autograd's nodes would have the parameters' gradients wait for this stream
        return _Captured(first, second, own, loss.detach(), dloss, grads)

    def _stream(self) -> AbstractContextManager:
        """One of its own, as a capture wants it; what ran before and after waits."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        return torch.cuda.stream(torch.cuda.Stream())


def _fill(into: list[Tensor | None], values: list[Tensor | None]) -> None:
    pairs = [(x, y) for x, y in zip(into, values, strict=True) if x is not None and y is not None]
    if pairs:  # of all in a few launches
        own, given = zip(*pairs, strict=True)
        torch._foreach_copy_(own, given)  # pyright: ignore[reportPrivateImportUsage]


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
        _fill(grads, captured.grads)
        return None, None, None, *grads


class _without_autocast_cache:
    """Makes each replay cast the weights, which autocast would otherwise cast once, before it."""

    def __enter__(self) -> None:
        self._before = torch.is_autocast_cache_enabled()
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_cache_enabled(self._before)
