"""What a CUDA graph is on a device, on a CPU: a step as the list of its kernels, on fixed memory.

A step of a small model takes the host longer in Python than in kernels. Here the step runs once
under a mode that sees every call of an operator. A replay calls the same operators in the same
order, each with an out= that is the tensor it returned then; views of such tensors stay right, and
are not made again. So nothing is allocated, no module is called and no argument is looked at.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class CannotRepeat(RuntimeError):
    """A step that was run, with this result, but has something in it that a replay would miss."""

    def __init__(self, why: str, result: Tensor) -> None:
        super().__init__(why)
        self.result = result


class HostGraph:
    """As graphs.py:CudaGraph, of operators on CPU tensors."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        with _Recorder(self.calls) as recorder:
            result = run()
        if recorder.refused is not None:
            raise CannotRepeat(recorder.refused, result)
        return result

    def replay(self) -> None:
        for function, args, kwargs in self.calls:
            function(*args, **kwargs)


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls
        self.refused: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.refused is None and not _repeatable(func, args):
            self.refused = f"{func} depends on values or draws random numbers"
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self.calls.append((func._op, args, kwargs))  # without OpOverload's own call
            return result
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        memory = {x.untyped_storage().data_ptr() for x in inputs if x.numel()}
        if all(x.untyped_storage().data_ptr() in memory or not x.numel() for x in outputs):
            return result  # views, whose memory stays
        if func.overloadpacket is not torch.ops.aten.empty:
            self.calls.append(_into(func, args, kwargs, outputs))
        return result


def _repeatable(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a replay does what the step does."""
    tags = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output)
    tags += (torch.Tag.dynamic_output_shape,)
    if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
        return len(args) < 4 or args[3] == 0  # it draws numbers for dropout
    return not any(tag in func.tags for tag in tags)


def _into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> Call:
    """The call that computes func(*args, **kwargs) into `outputs`."""
    variant = _out_variant(func)
    if variant is not None:
        out, names, dropped = variant
        if len(names) == len(outputs):
            given = {n: x for n, x in kwargs.items() if n not in dropped}
            return out._op, args, {**given, **dict(zip(names, outputs))}

    def run(*args: Any, **kwargs: Any) -> None:
        results = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
        for own, x in zip(outputs, results):
            own.copy_(x)

    return run, args, kwargs


# what a tensor that is given says itself
_OF_FACTORIES = frozenset(("dtype", "layout", "device", "pin_memory"))


@cache
def _out_variant(func: Any) -> tuple[Any, tuple[str, ...], frozenset[str]] | None:
    """The overload with out=, its names for the outputs, and arguments that it does not take."""
    if func.namespace != "aten":
        return None
    wanted = [(x.name, str(x.type)) for x in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        outs = tuple(x.name for x in other._schema.arguments if x.is_out)
        rest = [(x.name, str(x.type)) for x in other._schema.arguments if not x.is_out]
        dropped = frozenset(n for n, _ in wanted if (n, _) not in rest)
        remaining = [x for x in wanted if x[0] not in dropped]
        if outs and remaining == rest and dropped <= _OF_FACTORIES:
            return other, outs, dropped
    return None
