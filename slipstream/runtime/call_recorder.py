"""Records the operations and launches of a call, which runtime/call_replay.py then repeats."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from slipstream.runtime.launch_cache import of_thread

EMPTY = frozenset(f"aten::{name}" for name in ("empty", "empty_like", "new_empty", "empty_strided"))
ZEROS = frozenset(f"aten::{name}" for name in ("zeros", "zeros_like", "new_zeros"))
# Operations that are called as methods of the tensor, with the same positional arguments: torch
# parses these in a third of the time that it takes for an overload's.
METHODS = ("sum", "add", "sub", "mul", "neg", "exp", "flip", "cumsum", "copy_", "add_", "mul_")
# Makes a step's values, given all of them and their addresses.
Run = Callable[[list, list], None]
# Fresh memory.
Make = Callable[[], Tensor]


class Launch(Protocol):
    """A launch that has been made, with its tensors elsewhere."""

    def __call__(self, pointers: Sequence[int]) -> None: ...


# One of launches in a row, each with the places of its pointers among all that are given.
Together = Callable[[Sequence[tuple[Any, Sequence[int]]]], Launch]


def run_sequentially(launches: Sequence[tuple[Launch, Sequence[int]]]) -> Launch:
    def run(pointers: Sequence[int]) -> None:
        for launch, places in launches:
            launch([pointers[i] for i in places])

    return run


class Recorder(Protocol):
    def launched(
        self,
        tensors: Sequence[Tensor],
        again: Launch | None,
        together: Together = run_sequentially,
    ) -> None:
        """The record of a kernel's launch; None if it cannot be repeated."""
        ...


class ValueRef(NamedTuple):
    """A value of the record, or memory within it."""

    number: int
    offset: int = 0


class LaunchStep(NamedTuple):
    again: Launch
    together: Together
    places: tuple[ValueRef, ...]


class RecordedStep(NamedTuple):
    """reads, makes: numbers of values. run(values, addresses): makes them, and says where they are.

    A launch, which reads only addresses, has `launch` instead, and fresh memory `make`; fresh: its
    bytes.
    """

    reads: tuple[int, ...]
    makes: tuple[int, ...] = ()
    run: Run | None = None
    view: bool = False
    launch: LaunchStep | None = None
    make: Make | None = None
    fresh: int | None = None


class Unrecordable(Exception):
    pass


class CallRecorder(TorchDispatchMode):
    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.steps: list[RecordedStep] = []
        self.failed, self.launches, self.operations = False, 0, 0
        self._numbers: dict[int, tuple[Any, int]] = {}
        self._views: dict[int, ValueRef] = {}
        self._fresh: set[int] = set()  # addresses of memory of this call
        self.constants: dict[int, Tensor] = {}
        self.count, self.device = 0, inputs[0].device
        self._given = {x.untyped_storage().data_ptr() for x in inputs}
        for x in inputs:
            self._new(x)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with use_recorder(None):  # what it launches is part of it
            out = func(*args, **kwargs)
        try:
            self._operation(func, args, kwargs, out)
        except Unrecordable:
            self.failed = True
        return out

    def launched(
        self,
        tensors: Sequence[Tensor],
        again: Launch | None,
        together: Together = run_sequentially,
    ) -> None:
        self.launches += 1
        try:
            places = tuple(self._place(x) for x in tensors)
        except Unrecordable:
            again = None
        if again is None:
            self.failed = True
            return
        launch = LaunchStep(again, together, places)
        self.steps.append(RecordedStep(tuple(n for n, _ in places), launch=launch))

    def number(self, x: Tensor) -> int:
        if self._known(x):
            return self._numbers[id(x)][1]
        if x.untyped_storage().data_ptr() in self._fresh:
            raise Unrecordable  # of this call, and made without the recorder's knowledge
        number = self._new(x)
        self.constants[number] = x
        return number

    def _known(self, x: Tensor) -> bool:
        known = self._numbers.get(id(x))
        return known is not None and known[0]() is x

    def _new(self, x: Tensor) -> int:
        self._numbers[id(x)] = (weakref.ref(x), self.count)
        self.count += 1
        return self.count - 1

    def _made(self, x: Tensor) -> int:
        if self._known(x):  # in place
            return self._numbers[id(x)][1]
        self._fresh.add(x.untyped_storage().data_ptr())
        return self._new(x)

    def _place(self, x: Tensor) -> ValueRef:
        number = self.number(x)
        return self._views.get(number, ValueRef(number))

    def _operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name
        if name in EMPTY | ZEROS and not kwargs.get("pin_memory"):
            made, size = self._made(out), out.untyped_storage().nbytes()
            make = allocation(tuple(out.shape), out.stride(), out.dtype, out.device)
            if name in EMPTY:
                self.steps.append(RecordedStep((), (made,), make=make, fresh=size))
            else:
                self.operations += 1
                self.steps.append(RecordedStep((), (made,), _zeros(made, make)))
            return
        flat, spec = tree_flatten((args, kwargs))
        reads = {i: self.number(x) for i, x in enumerate(flat) if isinstance(x, Tensor)}
        outs, _ = tree_flatten(out)
        if not reads and not any(isinstance(x, Tensor) for x in outs):
            return  # of dtypes, such as promote_types, which every call of the key does alike
        if any(not isinstance(x, Tensor) or x.device != self.device for x in outs):
            raise Unrecordable
        view = is_view(func) and not any(map(self._known, outs))
        # of memory of this call, which lies in it as it did: that of an argument may not
        inside = view and isinstance(out, Tensor)
        inside = inside and out.untyped_storage().data_ptr() not in self._given
        if inside and _same_layout(flat[0], out):
            self._numbers[id(out)] = (weakref.ref(out), reads[0])
            return
        makes = tuple(map(self._made, outs))
        if view:
            number, offset = self._place(flat[0])
            begin = flat[0].data_ptr() - offset
            self._views |= {n: ValueRef(number, x.data_ptr() - begin) for n, x in zip(makes, outs)}
        else:
            self.operations += 1
        plain = sum(isinstance(x, Tensor) for x in args) == len(reads) and isinstance(out, Tensor)
        inside = inside and flat[0].dtype == out.dtype
        flat = [None if isinstance(x, Tensor) else x for x in flat]
        run = _nested(func, flat, spec, reads, makes)
        if inside:
            run = _restrided(out, reads[0], makes[0])
        elif plain:
            again = _method(func, args, kwargs)
            run = _plain(again, args, kwargs, tuple(reads.values()), makes[0])
        self.steps.append(RecordedStep(tuple(reads.values()), makes, run, view))


# Not in the class, where torch would wrap it in what first imports torch._dynamo, for seconds.
CallRecorder.__torch_dispatch__ = CallRecorder.dispatch


def _plain(func: Any, args: Any, kwargs: Any, reads: tuple[int, ...], made: int) -> Run:
    """func with values for the tensors among args; what it makes is one tensor."""
    places = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
    rest = [None if isinstance(x, Tensor) else x for x in args]

    def run(values: list, addresses: list) -> None:
        given = rest.copy()
        for i, n in zip(places, reads):
            given[i] = values[n]
        values[made] = x = func(*given, **kwargs)
        addresses[made] = x.data_ptr()

    return run


def _same_layout(x: Tensor, y: Tensor) -> bool:
    return (
        (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        and x.data_ptr() == y.data_ptr()
        and type(x) is type(y)
    )


def _restrided(like: Tensor, read: int, made: int) -> Run:
    """A view as `like` is one."""
    given = like.shape, like.stride(), like.storage_offset()

    def run(values: list, addresses: list) -> None:
        values[made] = x = values[read].as_strided(*given)
        addresses[made] = x.data_ptr()

    return run


def _method(func: Any, args: Any, kwargs: Any) -> Any:
    """func, or what does the same sooner."""
    name = func._schema.name.removeprefix("aten::")
    if name in METHODS and not kwargs:
        return getattr(Tensor, name)
    if name == "_to_copy" and kwargs.keys() == {"dtype"} and kwargs["dtype"] != args[0].dtype:
        return Tensor.to  # which copies no tensor of that dtype
    return func


def _nested(func: Any, flat: list, spec: Any, reads: dict[int, int], makes: tuple) -> Run:
    """func with values for tensors that are anywhere in its arguments, as flat and spec say."""

    def run(values: list, addresses: list) -> None:
        given = flat.copy()
        for i, n in reads.items():
            given[i] = values[n]
        again = tree_unflatten(given, spec)
        results, _ = tree_flatten(func(*again[0], **again[1]))
        for n, x in zip(makes, results):
            values[n], addresses[n] = x, x.data_ptr()

    return run


def is_view(func: Any) -> bool:
    """Whether a function returns a view of its first argument, or several."""
    made, given = (
        [x.alias_info for x in y] for y in (func._schema.returns, func._schema.arguments)
    )
    return len(made) == 1 and made[0] is not None and not made[0].is_write and given[0] is not None


def allocation(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Make:
    """By a tensor's method, whose arguments torch reads sooner than torch.empty_strided's."""
    return partial(torch.empty(0, dtype=dtype, device=device).new_empty_strided, size, stride)


def _zeros(made: int, make: Make) -> Run:
    def run(values: list, addresses: list) -> None:
        values[made] = x = make().zero_()
        addresses[made] = x.data_ptr()

    return run


@contextmanager
def use_recorder(whom: Recorder | None) -> Iterator[None]:
    """Sets this thread's recorder."""
    before, of_thread.recorder = of_thread.recorder, whom
    try:
        yield
    finally:
        of_thread.recorder = before


class LaunchCounter:
    """Counts what Triton launches from this thread."""

    def __enter__(self) -> "LaunchCounter":
        self.count, self._thread = 0, threading.get_ident()
        knobs: Any = sys.modules.get("triton.knobs")  # not before Triton 3.4
        self._hooks = None if knobs is None else knobs.runtime.launch_enter_hook
        if self._hooks is not None:
            self._hooks.add(self._launch)
        return self

    def _launch(self, metadata: Any) -> None:
        if threading.get_ident() == self._thread and of_thread.recorder is not None:
            self.count += 1

    def __exit__(self, *_: object) -> None:
        if self._hooks is not None:
            self._hooks.remove(self._launch)
