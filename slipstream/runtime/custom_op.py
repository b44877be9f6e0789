"""Registration of operators with torch.library, in one namespace.

A KernelOp has one implementation for CPU and CUDA and a fake one that only makes outputs of the
right shape; gradients are an autograd.Function outside of it. So torch.compile
(fullgraph=True), torch.export, fake tensors and dispatch modes all see one opaque node and never
look inside. A graph made by torch.export has the operator without the autograd.Function, so the
operator has its gradient as well (runtime/gradient.py). Plain calls on plain tensors go to the
implementation at once: the dispatcher would take as long as a launch.

Where a KernelOp's gradient is one call of another, autograd_function makes the autograd.Function.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from operator import itemgetter
from types import MappingProxyType
from typing import Any, get_type_hints

import torch
from torch.autograd.graph import increment_version

from slipstream.common.checks import device_type, expect_own_memory, name_of_caller
from slipstream.runtime import backends, call_replay, gradient, parallel_compile
from slipstream.runtime.autograd import (
    Function,
    Saved,
    is_tracing,
    once_differentiable,
    save,
    untraced,
)
from slipstream.runtime.backends import device_of, is_current, is_plain_call
from slipstream.runtime.launch_cache import of_thread
from slipstream.runtime.token_ids import raise_pending

NAMESPACE = "slipstream"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


# of the fields of a NamedTuple
_SCHEMA_TYPES = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    float: "float",
    float | None: "float?",
    int: "int",
    bool: "bool",
    str: "str",
    torch.dtype | None: "ScalarType?",
}


def schema_of(inputs: type, count: int | None = None) -> str:
    """The fields of a NamedTuple, or so many of them, as arguments of a schema, "Tensor q, int n":
    a new field is written down once."""
    hints = list(get_type_hints(inputs).items())[:count]
    return ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in hints)


class DirectCall:
    """A function of tensors on a GPU whose plain calls (backends.is_plain_call) are replayed
    (runtime/call_replay.py).

    Args:
        impl: called below autograd, with autocast off: dtypes are decided before. What it does on a
            GPU follows from what call_replay.call_key looks at.
        compile_also: given the arguments and the results, calls what such a call is followed by,
            its gradient, so that the kernels of both are compiled at once.
        max_operations: of torch, in a call that is replayed (call_replay.py); None for any number.
        written: places of the arguments that it writes into, and their names.
    """

    def __init__(
        self,
        impl: Callable,
        *,
        replay: bool = True,
        compile_also: Callable[[tuple, Any], object] | None = None,
        max_operations: int | None = call_replay.MAX_OPERATIONS,
        written: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.impl, self._replay, self._compile_also = impl, replay, compile_also
        self._max_operations, self._written = max_operations, written
        self._overload: Any = None
        self._names: tuple[str, ...] = ()  # of the arguments, if they may be named
        self._known: dict[tuple | None, call_replay.Records] = {}

    def __call__(self, *args: Any, **named: Any) -> Any:
        if named:
            args = self._by_position(args, named)
        x = args[0]
        if not is_plain_call(x) or is_tracing():
            return self._by_dispatcher(args)
        if self._replay and not backends.TRACING and call_replay.is_enabled(x):
            found = self._replayed(args)
            if found is not call_replay.MISS:
                return found
        device = device_type(x)
        if self._overload is not None and device not in ("cpu", "cuda"):
            return self._overload(*args)  # such as meta, which has no implementation
        plain = _without_negation(args, device)
        if torch.is_autocast_enabled(device):
            result = self._without_autocast(*plain)
        else:
            if self._written:
                self._before_writing(plain)
            result = _as_bases(self.impl(*plain), plain)
        return result if plain is args else self._written_back(result, plain, args)

    def _by_dispatcher(self, args: tuple) -> Any:
        """A call that torch is to see, such as one that is traced."""
        if self._overload is not None:
            return self._overload(*args)
        if is_tracing():
            return _Traced.apply(self._without_autocast, *args)
        return self._without_autocast(*args)

    def _written_back(self, result: Any, plain: tuple, args: tuple) -> Any:
        """The result, once what has been written into a copy of an argument is in the argument."""
        for n in self._written:
            if plain[n] is not args[n]:
                args[n].copy_(plain[n])
        return result

    def _by_position(self, args: tuple, named: dict[str, Any]) -> tuple:
        """All arguments, of which the last ones are named, in the schema's order."""
        if tuple(named) != (wanted := self._names[len(args) :]):
            raise TypeError(f"{self._overload}: want {wanted} by name, got {tuple(named)}")
        return (*args, *named.values())

    def _replayed(self, args: tuple) -> Any:
        """The call by a record, or MISS where there is none for it: it runs as it is then."""
        if of_thread.recorder is not None:
            return call_replay.MISS  # it is part of another
        key, addresses = call_replay.call_key(args)
        known = self._known.get(key)
        if known is None:
            if key is not None:
                self._expect(self._known_of(key), args)
            return call_replay.MISS
        if known.records:
            raise_pending()
        for record in known.records:
            if record.is_profiled():
                return call_replay.MISS
            result = self._play(record, args, addresses)
            if result is not call_replay.MISS:
                if record.written is not None:
                    increment_version(record.written(args))
                return result if record.makes_results else _as_bases(result, args)
        if known.closed:
            return call_replay.MISS
        if known.due:
            return self._record(known, args)
        self._expect(known, args)
        return call_replay.MISS

    def _play(self, record: call_replay.RecordedCall, args: tuple, addresses: list[Any]) -> Any:
        device = args[0].device
        autocast = record.operations and torch.is_autocast_enabled(device.type)
        if not autocast and is_current(device):
            return record.play(args, addresses)
        autocast_off = torch.autocast(device.type, enabled=False) if autocast else nullcontext()
        with device_of(device), autocast_off:
            return record.play(args, addresses)

    def _known_of(self, key: tuple) -> call_replay.Records:
        if len(self._known) >= call_replay.MAX_KEYS:
            self._known.clear()
        known = self._known[key] = call_replay.Records()
        return known

    def _expect(self, known: call_replay.Records, args: tuple) -> None:
        """The first call of a key, or of sizes at which it decides otherwise: compiles its kernels
        side by side, and has the next recorded."""
        known.due = True
        parallel_compile.compile_kernels(self._compile, args)

    def _compile(self, *args: Any) -> None:
        results = self._without_autocast(*args)
        if self._compile_also is not None:
            self._compile_also(args, results)

    def _record(self, known: call_replay.Records, args: tuple) -> Any:
        known.due = False
        result, record = call_replay.record(self._recorded, args, self._max_operations)
        written = [n for n in self._written if args[n] is not None]
        if record is not None and not (written and record.is_late):
            if written:
                record.written = itemgetter(*written)
            known.records.append(record)
        known.closed = record is None or len(known.records) >= call_replay.MAX_RECORDS
        return _as_bases(result, args)

    def _without_autocast(self, *args: Any) -> Any:
        return _as_bases(self._recorded(*args), args)

    def _before_writing(self, args: tuple) -> None:
        """Autograd does not see what kernels write: told of it, it refuses a backward that reads an
        earlier value. Calls that are replayed have the same strides."""
        for n, name in self._written.items():
            expect_own_memory(name, args[n])
        increment_version([x for n in self._written if (x := args[n]) is not None])

    def _recorded(self, *args: Any) -> Any:
        """Autocast would reach the torch operations inside; dtypes are decided before."""
        if self._written:
            self._before_writing(args)
        device = device_type(args[0])
        if not torch.is_autocast_enabled(device):
            return self.impl(*args)
        with torch.autocast(device, enabled=False):
            return self.impl(*args)


class _Traced(Function):
    """A call that is no operator, to torch.jit.trace: one node that calls it again. What its
    kernels write would be constants, or nothing."""

    operator = "slipstream"

    @staticmethod
    def forward(ctx: Any, call: Callable, *args: Any) -> Any:
        with untraced():  # sizes are tensors otherwise, which launches do not take
            results = call(*args)
        return tuple(results) if isinstance(results, list) else results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, saved: Saved, *grads: Any) -> Any:
        raise NotImplementedError(f"{name_of_caller(_Traced.operator)}: traced without gradients")


def _without_negation(args: tuple, device: str) -> tuple:
    """As torch's dispatcher does: negated views as copies, which are written back."""
    # torch negates where it computes; kernels, which Triton interprets on a CPU, do not
    if device == "cpu" and not backends.INTERPRETED:
        return args
    for x in args:
        if isinstance(x, torch.Tensor) and x.is_neg():
            return tuple(y.resolve_neg() if isinstance(y, torch.Tensor) else y for y in args)
    return args


def _as_bases(results: Any, args: tuple) -> Any:
    """The results of a forward as tensors that may be changed in place.

    torch refuses to change views that are made in a Function or under no_grad, so these are
    replaced. Views of arguments stay views.
    """
    if isinstance(results, torch.Tensor):
        return _as_base(results, args) if results._is_view() else results
    for x in results or ():
        if x is not None and x._is_view():
            return type(results)([x if x is None else _as_base(x, args) for x in results])
    return results


def _as_base(x: torch.Tensor, args: tuple) -> torch.Tensor:
    if not x._is_view():
        return x
    memory = x.untyped_storage()._cdata
    given = (y for y in args if isinstance(y, torch.Tensor))
    return x if any(y.untyped_storage()._cdata == memory for y in given) else x.data


class KernelOp(DirectCall):
    """slipstream::_name, registered with torch.library. Plain calls go past the dispatcher. Its
    callers are autograd functions, or have made sure that no gradient is wanted. They name what is
    not a tensor, in the schema's order: two flags that changed places would go unnoticed.

    The underscore says that the operator is private: its schema changes with any release.

    Args:
        schema: arguments and returns as torch.library wants them, "(Tensor x) -> Tensor"; the first
            argument is a tensor.
        impl: called on CPU and CUDA tensors, below autograd; outputs must not alias inputs.
        fake: the same arguments, shapes only; its strides must be those of `impl`.
        replay, compile_also: as DirectCall has them.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        impl: Callable,
        fake: Callable,
        *,
        replay: bool = False,
        compile_also: Callable[[tuple, Any], object] | None = None,
    ) -> None:
        super().__init__(impl, replay=replay, compile_also=compile_also)
        self.fake = fake
        name = f"_{name}"
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(name, self._without_autocast, device)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        _LIBRARY.impl(name, gradient.autograd_kernel(self.overload), "Autograd", with_keyset=True)
        self._overload = self.overload
        given = self.overload._schema.arguments
        self._names = tuple(x.name for x in given)
        aliases = enumerate(x.alias_info for x in given)
        self._written = {n: self._names[n] for n, x in aliases if x and x.is_write}

    def set_gradient(self, differentiable: Callable) -> None:
        """Registers a function of the operator's arguments that returns its first results with
        gradients, for calls that come by the dispatcher. Further results, which only the
        operator's own backward reads, have none."""
        gradient.set_gradient(self.overload, differentiable)

    def before(self, compile_also: Callable[[tuple, Any], object]) -> DirectCall:
        """The same operator, called where a backward follows."""
        call = DirectCall(self.impl, replay=self._replay, compile_also=compile_also)
        call._overload, call._names, call._written = self.overload, self._names, self._written
        return call


def autograd_function(
    op: KernelOp, backward_op: KernelOp, *, results: str, wrt: str, **fixed: Any
) -> type[Function]:
    """The Function of an operator whose gradients are one call of another operator. It becomes the
    gradient of the operator itself as well (set_gradient).

    The names in backward_op's schema say what is saved: each is an argument of `op`, one of its
    results, or dy for the gradient of a result y. Where no gradient came, "Tensor dy" is zeros and
    "Tensor? dy" is None.

    Args:
        results: names of op's results, "y final". One without a gradient in backward_op's schema
            is saved if that names it, and not returned.
        wrt: the arguments of op whose gradients backward_op returns, without those that are None,
            which it takes too. What it returns after these is left.
        fixed: arguments of op that `apply` does not take, and their values.
    """
    names, differentiable = results.split(), wrt.split()
    assert len(names) == len(op.overload._schema.returns)
    taken = [x for x in op._names if x not in fixed]
    assert set(differentiable) <= set(taken)
    kinds = {x.name: str(x.type) for x in backward_op.overload._schema.arguments}
    returned = [n for n, y in enumerate(names) if f"d{y}" in kinds]
    dnames = [f"d{names[n]}" for n in returned]
    saved_names = [x for x in kinds if "Tensor" in kinds[x] and x not in dnames]
    options = [x for x in kinds if "Tensor" not in kinds[x]]
    # Places instead of names, a dict of which takes 5 us more of each call: where the arguments of
    # op are in what it is given, what is kept in (*args, *results), and so on.
    op_from = [[*taken, *fixed].index(x) for x in op._names]
    saved_from = [[*taken, *names].index(x) for x in saved_names]
    options_from = [[*taken, *names].index(x) for x in options]
    backward_from = [[*saved_names, *options, *dnames].index(x) for x in kinds]
    # which saved tensor says whether an argument was given; an argument that is not saved was
    given_from = [saved_names.index(x) if x in saved_names else None for x in differentiable]
    grads_from = [differentiable.index(x) if x in differentiable else None for x in taken]
    # a single gradient that did not come is that of a result which nothing depends on
    required = [n for n, x in enumerate(dnames) if kinds[x] == "Tensor"] if dnames[1:] else []
    values = (*fixed.values(),)

    def forward(ctx: Any, *args: Any) -> Any:
        all_args = args + values
        found: Any = op(*([all_args[n] for n in op_from] if values else args))
        found = (found,) if isinstance(found, torch.Tensor) else found
        known = args + found
        save(ctx, *[known[n] for n in saved_from])
        ctx.options = [known[n] for n in options_from]
        ctx.like = [(found[n].shape, found[n].dtype, found[n].device) for n in required]
        ctx.set_materialize_grads(False)
        outputs: Any = tuple([found[n] for n in returned])
        return outputs if len(outputs) > 1 else outputs[0]

    def backward(ctx: Any, saved: Saved, *grads: torch.Tensor | None) -> Any:
        if grads[0] is None and all(dy is None for dy in grads):
            return (None,) * len(taken)
        douts = [*grads]
        for n, (shape, dtype, device) in zip(required, ctx.like):
            if douts[n] is None:
                douts[n] = torch.zeros(shape, dtype=dtype, device=device)
        known = (*saved, *ctx.options, *douts)
        found: Any = backward_op(*[known[n] for n in backward_from])
        left = iter((found,) if isinstance(found, torch.Tensor) else found)
        given = [next(left) if n is None or saved[n] is not None else None for n in given_from]
        return tuple([None if n is None else given[n] for n in grads_from])

    name = op.overload.name()
    body = {"operator": name, "forward": staticmethod(forward)}
    body["backward"] = staticmethod(once_differentiable(backward))
    metaclass: Any = type(Function)
    function = metaclass(name.partition("::")[2], (Function,), body)
    taken_from = [n for n, x in enumerate(op._names) if x not in fixed]
    op.set_gradient(lambda *args: function.apply(*[args[n] for n in taken_from]))
    return function
