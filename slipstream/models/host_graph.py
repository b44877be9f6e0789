"""The counterpart of a CUDA graph on a CPU: a step as the list of its kernels, on fixed memory.

A step of a small model takes the host longer in Python than in kernels. Here the step runs once
under a mode that sees every call of an operator. A replay calls the same operators in the same
order, each with an out= that is the tensor it returned then; views of such tensors stay right, and
are not made again. So nothing is allocated, no module is called and no argument is looked at.
TorchScript's interpreter makes the calls, where it has words for their arguments. What depends on
nothing, such as a table of decays, is not computed again, and threads share the rows of a weight.
"""

import math
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# numbers of a weight that are worth a thread, and columns whose sums are computed together
PART, TOGETHER = 1 << 14, 4


class Call(NamedTuple):
    """Repeats a call of an operator.

    op: its overload, None for a function of ours. pure: it does nothing but write what it computes
    from its arguments into out=. results: what it returns is copied into these, if any.
    """

    function: Callable[..., Any]
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pure: bool = False
    results: tuple[Tensor, ...] = ()


class CannotRepeat(RuntimeError):
    """A step ran and has this result, but a replay would miss a part of it."""

    def __init__(self, why: str, result: Tensor) -> None:
        super().__init__(why)
        self.result = result


class HostGraph:
    """As graphs.py:CudaGraph, of operators on CPU tensors.

    Calls in a row are one function of TorchScript, whose interpreter takes a third of the time that
    Python takes to make them one by one; where it cannot express one, Python makes it.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.runs: list[Callable[[], Any]] = []

    def capture(self, run: Callable[[], Tensor]) -> Tensor:
        recorder = _Recorder(self.calls)
        try:
            with recorder:
                result = run()
        except Exception:
            recorder.undo()  # the step will run again
            raise
        if recorder.refused is not None:
            raise CannotRepeat(recorder.refused, result)
        self.calls[:] = _without_constants(self.calls)
        for is_script, group in groupby(self.calls, _is_expressible):
            calls = list(group)
            self.runs += _scripted(calls) if is_script else [_by_python(call) for call in calls]
        return result

    def replay(self) -> None:
        for run in self.runs:
            run()


def _without_constants(calls: list[Call]) -> list[Call]:
    """Those that do not compute the same at every replay: from numbers alone, or from results of
    such calls that nothing else writes to."""
    written = [_memory(_written(call)) for call in calls]
    writers = Counter(address for addresses in written for address in addresses)
    constant: set[int] = set()
    changing = []
    for call, addresses in zip(calls, written):
        once = call.pure and all(writers[x] == 1 for x in addresses)
        if once and _memory((call.args, call.kwargs)) - addresses <= constant:
            constant |= addresses
        else:
            changing.append(call)
    return changing


def _written(call: Call) -> list[Any]:
    if call.op is None:
        return [call.args, call.kwargs]  # as far as anybody knows
    arguments = call.op._schema.arguments
    given = dict(zip((x.name for x in arguments), call.args)) | call.kwargs
    names = [x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write]
    return [*(given.get(name) for name in names), *call.results]


def _memory(tree: Any) -> set[int]:
    """Addresses of the memory that tensors are views of."""
    return {x.untyped_storage().data_ptr() for x in _tensors(tree)}


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _by_python(call: Call) -> Callable[[], Any]:
    run = partial(call.function, *call.args, **call.kwargs)
    return partial(_copy_results, run, call.results) if call.results else run


def _copy_results(run: Callable[[], Any], results: tuple[Tensor, ...]) -> None:
    for own, x in zip(results, _tensors(run())):
        own.copy_(x)


def _scripted(calls: list[Call]) -> list[Callable[[], Any]]:
    """The same calls as one function, or one by one if TorchScript refuses one of them."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    lines = []
    for call in calls:
        args = [_literal(x, tensors) for x in call.args]
        args += [f"{name}={_literal(x, tensors)}" for name, x in call.kwargs.items()]
        namespace, name = call.op._schema.name.split("::")
        line = f"torch.ops.{namespace}.{name}({', '.join(args)})"
        if call.results:
            names = [f"y{len(lines)}_{i}" for i in range(len(call.results))]
            lines.append(f"    {', '.join(names)} = {line}")
            for name, x in zip(names, call.results):
                lines.append(f"    torch.ops.aten.copy_({_literal(x, tensors)}, {name})")
        else:
            lines.append(f"    {line}")
    parameters = ", ".join(f"{name}: Tensor" for name, _ in tensors.values())
    source = "\n".join([f"def replay({parameters}):", *lines, ""])
    try:
        function = torch.jit.CompilationUnit(source).replay
    except Exception:  # of any kind: the step has run, and must not again
        return [_by_python(call) for call in calls]
    return [partial(function, *(x for _, x in tensors.values()))]


def _is_expressible(call: Call) -> bool:
    return call.op is not None and all(_is_literal(x) for x in (*call.args, *call.kwargs.values()))


def _is_literal(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return len(x) > 0 and all(_is_literal(y) for y in x)
    return x is None or isinstance(x, (Tensor, bool, int, float, str, torch.dtype))


def _literal(x: Any, tensors: dict[int, tuple[str, Tensor]]) -> str:
    """An argument in TorchScript; tensors are parameters, which get names here."""
    if isinstance(x, Tensor):
        return tensors.setdefault(id(x), (f"t{len(tensors)}", x))[0]
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(_literal(y, tensors) for y in x)}]"
    if isinstance(x, float) and not math.isfinite(x):
        return f"float('{x}')"
    return str(x) if isinstance(x, torch.dtype) else repr(x)


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls
        self.refused: str | None = None
        self._made: set[int] = set()  # addresses of memory that the step has allocated
        self._before: dict[Any, tuple[Tensor, Tensor]] = {}  # what else it has changed

    def undo(self) -> None:
        """Restores the values that the step has changed."""
        for x, before in reversed(self._before.values()):
            x.copy_(before)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.refused is not None:
            return func(*args, **kwargs)
        if not _repeatable(func, args, kwargs):
            self.refused = f"{func} depends on values or draws random numbers"
        try:
            self._keep(func, args, kwargs)
        except Exception as e:  # of a tensor without memory of its own
            self.refused = str(e)
        result = func(*args, **kwargs)
        try:
            self._record(func, args, kwargs, result)
        except Exception as e:
            self.refused = str(e)
        return result

    def _keep(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not func._schema.is_mutable:
            return
        given = dict(zip((x.name for x in func._schema.arguments), args)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for x in tree_leaves(given.get(argument.name)):
                if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self._made:
                    key = x.data_ptr(), x.shape, x.stride(), x.dtype
                    if key not in self._before:
                        self._before[key] = x, x.clone()

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        outputs, inputs = _tensors(result), _tensors((args, kwargs))
        if func._schema.is_mutable:
            # what it returns beside the tensors that it writes to
            made = [x for x in func._schema.returns if x.alias_info is None]
            if made and len(made) != len(outputs):
                raise RuntimeError(f"{func} returns a tensor that it was given, and another")
            results = tuple(outputs) if made else ()
            self._made.update(x.untyped_storage().data_ptr() for x in results)
            # _op: without OpOverload's own call
            self.calls.append(Call(func._op, func, args, kwargs, results=results))
            return
        memory = {x.untyped_storage().data_ptr() for x in inputs if x.numel()}
        if all(x.untyped_storage().data_ptr() in memory or not x.numel() for x in outputs):
            return  # views, whose memory stays
        self._made.update(x.untyped_storage().data_ptr() for x in outputs)
        if func.overloadpacket is not torch.ops.aten.empty:
            self.calls.append(_into(func, args, kwargs, outputs))


def _repeatable(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a replay does what the step does."""
    tags = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output)
    tags += (torch.Tag.dynamic_output_shape,)
    names = [x.name for x in func._schema.arguments]
    if "dropout_p" in names:  # attention, which draws numbers for dropout alone
        return (dict(zip(names, args)) | kwargs).get("dropout_p", 0) == 0
    return not any(tag in func.tags for tag in tags)


def _into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> Call:
    """The call that computes func(*args, **kwargs) into `outputs`."""
    if func is torch.ops.aten.mm.default and (parts := _parts(args[0], args[1])) > 1:
        return _product_in_parts(args[0], args[1], outputs[0], parts)
    variant = _out_variant(func)
    if variant is not None:
        out, names, dropped = variant
        if len(names) == len(outputs):
            # `outputs` have their memory's order
            given = {n: x for n, x in kwargs.items() if n not in (*dropped, "memory_format")}
            return Call(out._op, out, args, {**given, **dict(zip(names, outputs))}, pure=True)

    if all(str(x.type) == "Tensor" for x in func._schema.returns):
        return Call(func._op, func, args, kwargs, results=tuple(outputs))

    def run(*args: Any, **kwargs: Any) -> None:
        _copy_results(partial(func, *args, **kwargs), tuple(outputs))

    return Call(run, None, args, kwargs)


def _parts(x: Tensor, w: Tensor) -> int:
    """How many parts of the columns of w in x w threads take in turns, 1 for no parts.

    torch gives a product with one row to one thread, which reads a weight half as fast as two do.
    """
    K, N = w.shape
    threads = min(torch.get_num_threads(), K * N // PART)
    if x.shape[0] != 1 or w.stride() != (1, K) or threads < 2:
        return 1
    parts = [n for n in range(1, N // 8 + 1) if N % (n * TOGETHER) == 0]
    # by the time of the thread with most of them, and in fewest parts
    return min(parts, key=lambda n: (-(-n // threads) / n, n), default=1)


def _product_in_parts(x: Tensor, w: Tensor, out: Tensor, parts: int) -> Call:
    """x w, of x [1, K], as one product of each part of the columns: the same sums."""
    op = torch.ops.aten.bmm.out
    weights = w.mT.unflatten(0, (parts, -1)).mT
    into = out.view(parts, 1, -1)
    return Call(op._op, op, (x.expand(parts, *x.shape), weights), {"out": into})


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
