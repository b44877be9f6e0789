"""A stand-in for a CUDA graph on a CPU: the operators that a step has called, on the same memory.
As in a CUDA graph, a replay runs no Python of the step, and writes into the tensors of the
capture."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REFUSED = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
)


class ReplayedCalls:
    """The interface of models/graphs.py:Graph."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        recorder = _Recorder(self.calls)
        try:
            with recorder:
                return run()
        except Exception:
            recorder.undo()  # a capture that fails has run nothing
            raise

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, outputs in self.calls:
                for own, x in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                    if own is not x and own.data_ptr() != x.data_ptr():
                        own.copy_(x)


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls = calls
        self._made: set[int] = set()  # addresses of memory that the step has allocated
        self._before: list[tuple[Tensor, Tensor]] = []

    def undo(self) -> None:
        for x, before in reversed(self._before):
            x.copy_(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = dict(zip((x.name for x in func._schema.arguments), args)) | kwargs
        if any(tag in func.tags for tag in REFUSED) and given.get("dropout_p") != 0:
            raise RuntimeError(f"{func} is not permitted when stream is capturing")
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for x in _tensors(given.get(argument.name)):
                    if x.untyped_storage().data_ptr() not in self._made:
                        self._before.append((x, x.clone()))
        result = func(*args, **kwargs)
        memory = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
        made = [x.untyped_storage().data_ptr() for x in _tensors(result)]
        self._made.update(set(made) - memory)
        if func._schema.is_mutable or not set(made) <= memory:  # views stay right
            self.calls.append((func, args, kwargs, _tensors(result)))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
