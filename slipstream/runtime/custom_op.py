"""Registration of operators with torch.library, in one namespace.

A KernelOp has one implementation for CPU and CUDA and a fake one that only makes outputs of the
right shape; gradients are an autograd.Function outside of it. So torch.compile
(fullgraph=True), torch.export, fake tensors and dispatch modes all see one opaque node and never
look inside. A graph made by torch.export has the operator without the autograd.Function, so the
operator has its gradient as well (runtime/autograd.py). Plain calls on plain tensors go to the
implementation at once: the dispatcher would take as long as a launch.

Where a KernelOp's gradient is one call of another, with_gradient makes the autograd.Function.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from operator import itemgetter
from types import MappingProxyType
from typing import Any, get_type_hints

import torch
from torch.autograd.graph import increment_version

from slipstream.common.checks import device_type, expect_own_memory, name_of_caller
from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import autograd as gradient
from slipstream.runtime import (
    backends,
    call_replay,
    compile_ahead,
    dispatch,
    guarded_launch,
    kernel_pair,
    launch_cache,
    parallel_compile,
    token_ids,
)
from slipstream.runtime.autograd import Function, Saved, is_tracing, once_differentiable, untraced
from slipstream.runtime.kernel_pair import KernelPair, Mismatch, Probe, by_name, compare, fresh
from slipstream.runtime.symbolic_sizes import value_of

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


def schema_of(inputs: type, count: int | None = None, **types: str) -> str:
    """The fields of a NamedTuple, or so many of them, as arguments of a schema, "Tensor q, int n":
    a new field is written down once. types: those of fields that an operator has otherwise, such as
    state="Tensor(a!)", which it writes into."""
    hints = list(get_type_hints(inputs).items())[:count]
    return ", ".join(f"{types.get(name) or _SCHEMA_TYPES[kind]} {name}" for name, kind in hints)


class DirectCall:
    """A function of tensors on a GPU whose plain calls (backends.is_plain_call) are replayed
    (runtime/call_replay.py).

    Args:
        impl: called below autograd, with autocast off: dtypes are decided before. What it does on a
            GPU follows from what call_replay.call_key looks at.
        compile_also: given the arguments and the results, calls what such a call is followed by,
            its gradient, so that the kernels of both are compiled at once.
        at_sizes: the arguments in other sizes, whose kernels are compiled after those of a first
            call (compile_ahead.py), also where calls are not replayed.
        max_operations: of torch, in a call that is replayed (call_replay.py); None for any number.
        written: places of the arguments that it writes into, and their names.
    """

    # whether a record gets tensors of its own (call_recorder.py)
    _detach = True

    def __init__(
        self,
        impl: Callable,
        *,
        replay: bool = True,
        compile_also: Callable[[tuple, Any], object] | None = None,
        at_sizes: compile_ahead.InOtherSizes | None = None,
        max_operations: int | None = call_replay.MAX_OPERATIONS,
        written: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.impl, self._replay, self._compile_also = impl, replay, compile_also
        self.at_sizes, self._has_keys = at_sizes, replay or at_sizes is not None
        self._max_operations, self._written = max_operations, written
        self._overload: Any = None
        self._names: tuple[str, ...] = ()  # of the arguments, if they may be named
        self._known: dict[tuple | None, call_replay.Records] = {}

    def __call__(self, *args: Any, **named: Any) -> Any:
        if named:
            args = self._by_position(args, named)
        x = args[0]
        if not backends.is_plain_call(x) or is_tracing():
            return self._by_dispatcher(args)
        if self._has_keys and not backends.TRACING and call_replay.is_enabled(x):
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
        """Puts all arguments, whose last ones are named, into the schema's order."""
        if tuple(named) != (wanted := self._names[len(args) :]):
            raise TypeError(f"{self._overload}: want {wanted} by name, got {tuple(named)}")
        return (*args, *named.values())

    def _replayed(self, args: tuple) -> Any:
        """The call by a record, or MISS where there is none for it: it runs as it is then."""
        if launch_cache.of_thread.recorder is not None:
            return call_replay.MISS  # it is part of another
        key, addresses = call_replay.call_key(args)
        known = self._known.get(key)
        if known is None:
            if key is not None:
                self._expect(self._known_of(key), args)
                if self.at_sizes is not None:
                    compile_ahead.begin(self._compile, args, self.at_sizes)
            return call_replay.MISS
        if known.records:
            token_ids.raise_pending()
        for record in known.records:
            if record.is_profiled():
                return call_replay.MISS
            result = self._play(record, args, addresses)
            if result is not call_replay.MISS:
                if record.written is not None:
                    increment_version(record.written(args))
                return result
        if known.closed:
            return call_replay.MISS
        if known.due:
            return self._record(known, args)
        self._expect(known, args)
        return call_replay.MISS

    def _play(self, record: call_replay.RecordedCall, args: tuple, addresses: list[Any]) -> Any:
        device = args[0].device
        autocast = record.operations and torch.is_autocast_enabled(device.type)
        if not autocast and backends.is_current(device):
            return record.play(args, addresses)
        autocast_off = torch.autocast(device.type, enabled=False) if autocast else nullcontext()
        with backends.device_of(device), autocast_off:
            return record.play(args, addresses)

    def _known_of(self, key: tuple) -> call_replay.Records:
        made = call_replay.Records(closed=not self._replay)
        return call_replay.remember(self._known, key, made, call_replay.MAX_KEYS)

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
        most, detach = self._max_operations, self._detach
        result, record = call_replay.record(self._recorded, args, most, detach)
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
    """Copies negated views, as torch's dispatcher does, and writes the copies back."""
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
        impl: called on CPU and CUDA tensors, below autograd; outputs must not alias inputs. None is
            a KernelPair of the further arguments.
        fake: the same arguments, shapes only; its strides must be those of `impl`. Where there is a
            plain twin, None has that make them.
        kernel, plain, kind, packed, in_torch_if: as KernelPair has them.
        probe: a Probe, several of them, or a Mismatch (runtime/kernel_pair.py). A Probe is run by
            the operator and its gradient, whichever of their kernels is probed.
        forward: of a gradient, the operator it belongs to, whose probe is its own too.
        replay, at_sizes, max_operations: as DirectCall has them; the last for the gradient, too.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        impl: Callable | None = None,
        fake: Callable | None = None,
        *,
        kernel: str = "",
        plain: Callable | None = None,
        kind: Callable[..., KernelKey] | None = None,
        probe: Probe | tuple[Probe, ...] | Mismatch | None = None,
        packed: Mapping[str, type] = MappingProxyType({}),
        in_torch_if: Callable[..., bool] | None = None,
        forward: "KernelOp | None" = None,
        replay: bool = False,
        at_sizes: compile_ahead.InOtherSizes | None = None,
        max_operations: int | None = call_replay.MAX_OPERATIONS,
    ) -> None:
        _LIBRARY.define(f"_{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(getattr(torch.ops, NAMESPACE), f"_{name}").default
        given, returns = self.overload._schema.arguments, self.overload._schema.returns
        names = tuple(x.name for x in given)
        if impl is None:
            assert plain is not None and kind is not None and (probe or forward) is not None
            is_list = len(returns) == 1 and str(returns[0].type) == "List[Tensor]"
            impl = KernelPair(
                names, kernel, plain, kind, self._mismatch, packed, is_list, in_torch_if
            )
            fake = fake or impl.in_torch
        assert fake is not None
        super().__init__(impl, replay=replay, at_sizes=at_sizes, max_operations=max_operations)
        self.name, self.fake, self._names, self._overload = name, fake, names, self.overload
        self._kind, self._probe, self._packed = kind, probe, packed
        self._forward: KernelOp = forward or self
        self.backward: Any = None  # the KernelOp that with_gradient makes
        self._differentiable: Callable | None = None  # of set_gradient
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(f"_{name}", self._without_autocast, device)
        torch.library.register_fake(f"{NAMESPACE}::_{name}", fake, lib=_LIBRARY)
        autograd = gradient.autograd_kernel(self.overload)
        _LIBRARY.impl(f"_{name}", autograd, "Autograd", with_keyset=True)
        aliases = enumerate(x.alias_info for x in given)
        self._written = {n: names[n] for n, x in aliases if x and x.is_write}

    def with_gradient(
        self,
        schema: str,
        kernel: str,
        *,
        results: str,
        wrt: str,
        plain: Callable | None = None,
        fake: Callable | None = None,
        **fixed: Any,
    ) -> type[Function]:
        """The autograd_function of this operator and of slipstream::_name_backward, which becomes
        ``backward`. It has the kind, the probe and the NamedTuples of this one.

        Args:
            schema, kernel: of the gradient.
            plain: None differentiates this operator's. fake: None is a list of tensors like those
                of wrt that there are.
        """
        names, pair, wanted = self._names, self.impl, wrt.split()
        assert isinstance(pair, KernelPair)
        # of the schema, which is parsed once it is registered
        taken = [x.split()[-1] for x in schema[: schema.rindex(") ->")].split(", ")]
        places = [taken.index(x) for x in wanted]

        def like(*args: Any) -> list[torch.Tensor]:
            given = [args[n] for n in places]
            return [x.new_empty(x.shape) for x in given if x is not None]

        if plain is None:
            plain = kernel_pair.gradients_in_torch(
                pair.in_torch,
                names,
                [x for x in taken if x != "impl"],
                results.split(),
                wanted,
                fixed,
            )
        self.backward = KernelOp(
            f"{self.name}_backward",
            schema,
            kernel=kernel,
            plain=plain,
            fake=fake or like,
            kind=self._kind,
            probe=self._probe,
            packed={x: t for x, t in self._packed.items() if t._fields[0] in taken},
            forward=self,
            replay=self._replay,
            max_operations=self._max_operations,
        )
        return gradient.autograd_function(self, self.backward, results=results, wrt=wrt, **fixed)

    def candidates(
        self, reason: Callable[..., str | None], asks_interpreter: bool = False
    ) -> tuple[dispatch.Candidate, ...]:
        """dispatch.triton_or_eager, where the kernels of a kind may be known to fail.

        Args:
            reason: of arguments by their names, or of NamedTuples, first one that decides about
                device and dtype, why the kernels can't take them, or None.
            asks_interpreter: as dispatch.triton_or_eager.
        """
        assert self._kind is not None
        kind = by_name(self._kind, (*inspect.signature(reason).parameters,))

        def unsupported_reason(*call: Any) -> str | None:
            device = dispatch.first_of(call).device
            return reason(*call) or guarded_launch.known_failure(lambda: kind(call), device)

        return dispatch.triton_or_eager(unsupported_reason, asks_interpreter)

    def _mismatch(self, args: tuple) -> str | None:
        """Runs a Guard's probe for a call of these arguments."""
        # of a call that is recorded, too: torch takes its numbers inside the record alone
        args = tuple(map(value_of, args))
        if callable(self._probe):
            assert isinstance(self.impl, KernelPair)
            return self.impl.named(self._probe)(args)
        forward, known = self._forward, dict(zip(self._names, args))
        probes = forward._probe if isinstance(forward._probe, tuple) else (forward._probe,)
        found = (forward._compare(probe, known) for probe in probes)
        return next((x for x in found if x is not None), None)

    def _compare(self, probe: Any, known: dict[str, Any]) -> str | None:
        """A Probe's, of the kind of arguments that are known."""
        pair = self.impl
        assert isinstance(pair, KernelPair)
        given = {name: known.get(name) for name in self._names}
        given = fresh({**probe, "impl": dispatch.TRITON_OR_EAGER}, given)
        written = [*self._written.values()]
        if (call := self._differentiable) is None:
            return compare(self, pair.in_torch, given, written, gradients=False)
        at = self._names.index("impl")

        def plain(*args: Any) -> Any:
            return call(*args[:at], dispatch.PLAIN[0], *args[at + 1 :])

        return compare(call, plain, given, written, gradients=True)

    def set_gradient(self, differentiable: Callable) -> None:
        """Registers a function of the operator's arguments that returns its first results with
        gradients, for calls that come by the dispatcher. Further results, which only the
        operator's own backward reads, have none."""
        self._differentiable = differentiable
        gradient.set_gradient(self.overload, differentiable)

    def before(
        self, compile_also: Callable[[tuple, Any], object], at_sizes: compile_ahead.InOtherSizes
    ) -> DirectCall:
        """Returns the operator for calls that a backward follows."""
        call = DirectCall(
            self.impl, replay=self._replay, compile_also=compile_also, at_sizes=at_sizes
        )
        call._overload, call._names, call._written = self.overload, self._names, self._written
        return call
