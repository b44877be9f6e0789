"""Calls just like an earlier one, without what Python works out for each of them.

What an operator allocates, computes and launches follows from the shapes, strides, dtypes and
alignment of its tensors and from its options: Key. The second call of a key is recorded: each
operation of torch by the values that it reads and makes, each launch of a kernel by the places of
its tensors (kernels/kept.py). From the third on the record is played: fresh memory, the same
launches, other addresses. A temporary tensor is let go after its last use, as it was before. Those
that only kernels see are places of one allocation, where all of them are small.

A call is not recorded where that would not be all of it: a kernel is launched by other means, an
operation gives a number to the host, or there are more operations of torch than launches pay for.

    SLIPSTREAM_REPLAY   on, or off
"""

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

Key = tuple
ON = os.environ.get("SLIPSTREAM_REPLAY", "on") != "off"
# Operations of torch in a record besides fresh memory and views, each of which takes as long as a
# launch: so many, or half as many as there are launches.
MOST_OPERATIONS = 6
# Bytes of temporary tensors that may come in one allocation: it is there until the last is let go.
MOST_ROOM = 1 << 23
_ALIGNED = 512  # as torch's allocator does
# Keys of an operator: past this it starts anew.
MOST_KEYS = 1024
_PLAIN = (Tensor, Parameter)
_EMPTY = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "new_empty", "empty_strided")
)
_THREAD = threading.local()


def wanted(x: Tensor) -> bool:
    """Of a call on x: elsewhere nothing is launched, and what is done may depend on values."""
    return ON and x.is_cuda


def key_of(args: Sequence[Any]) -> Key | None:
    """None for what can't be a key. All tensors are on the first one's device."""
    parts: list[Any] = [args[0].get_device()]
    for x in args:
        if type(x) in _PLAIN:
            parts += (x.shape, x.stride(), x.dtype, x.data_ptr() & 15)
        elif isinstance(x, Tensor):
            return None
        else:
            parts.append(x)
    return tuple(parts)


def kind_of(args: Sequence[Any]) -> Key:
    """What calls of different numbers of sequences, tokens and heads have in common."""
    parts: list[Any] = []
    for x in args:
        shaped = isinstance(x, Tensor)
        parts += (x.dtype, x.dim(), x.shape[3:], x.data_ptr() & 15) if shaped else (x,)
    return tuple(parts)


class Launch(Protocol):
    """A launch that has been made, with its tensors elsewhere."""

    def __call__(self, pointers: Sequence[int]) -> None: ...


class Recorder(Protocol):
    def launched(self, tensors: Sequence[Tensor], again: Launch | None) -> None:
        """Of a kernel, with these; None if it can't be done again."""
        ...


def recorder() -> Recorder | None:
    """This thread's, to be told of a launch."""
    return getattr(_THREAD, "recorder", None)


class Place(NamedTuple):
    """A value of the record, or memory within it."""

    number: int
    offset: int = 0


class Step(NamedTuple):
    """reads, makes: numbers of values. run(values, addresses): makes them, and says where they are.

    A launch reads only addresses; fresh: bytes of the memory that is all it makes.
    """

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    run: Callable[[list, list], None]
    view: bool = False
    launch: bool = False
    fresh: int | None = None


class Unrecordable(Exception):
    pass


class _Recorder(TorchDispatchMode):
    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.failed, self.launches, self.operations = False, 0, 0
        self._numbers: dict[int, tuple[Any, int]] = {}
        self._views: dict[int, Place] = {}
        self._fresh: set[int] = set()  # addresses of memory of this call
        self.constants: dict[int, Tensor] = {}
        self.count, self._device = 0, inputs[0].device
        for x in inputs:
            self._new(x)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with _nobody():  # what it launches is part of it
            out = func(*args, **kwargs)
        try:
            self._operation(func, args, kwargs, out)
        except Unrecordable:
            self.failed = True
        return out

    def launched(self, tensors: Sequence[Tensor], again: Launch | None) -> None:
        self.launches += 1
        try:
            places = [self._place(x) for x in tensors]
        except Unrecordable:
            again = None
        if again is None:
            self.failed = True
            return

        def run(values: list, addresses: list) -> None:
            again([addresses[n] + at for n, at in places])

        self.steps.append(Step(tuple(n for n, _ in places), (), run, launch=True))

    def number(self, x: Tensor) -> int:
        if self._known(x):
            return self._numbers[id(x)][1]
        if x.untyped_storage().data_ptr() in self._fresh:
            raise Unrecordable  # of this call, and nobody saw how it was made
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

    def _place(self, x: Tensor) -> Place:
        number = self.number(x)
        return self._views.get(number, Place(number))

    def _operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name
        if name in _EMPTY and not kwargs.get("pin_memory"):
            made = self._made(out)
            size = out.untyped_storage().nbytes()
            self.steps.append(Step((), (made,), _allocation(out, made), fresh=size))
            return
        flat, spec = tree_flatten((args, kwargs))
        reads = {i: self.number(x) for i, x in enumerate(flat) if isinstance(x, Tensor)}
        outs, _ = tree_flatten(out)
        if any(not isinstance(x, Tensor) or x.device != self._device for x in outs):
            raise Unrecordable
        view = len(outs) == 1 and not self._known(outs[0]) and _is_view(func)
        makes = tuple(map(self._made, outs))
        if view:
            number, offset = self._place(flat[0])
            offset += outs[0].data_ptr() - flat[0].data_ptr()
            self._views[makes[0]] = Place(number, offset)
        else:
            self.operations += 1

        def run(values: list, addresses: list) -> None:
            given = flat.copy()
            for i, n in reads.items():
                given[i] = values[n]
            again = tree_unflatten(given, spec)
            results, _ = tree_flatten(func(*again[0], **again[1]))
            for n, x in zip(makes, results):
                values[n], addresses[n] = x, x.data_ptr()

        flat = [None if isinstance(x, Tensor) else x for x in flat]
        self.steps.append(Step(tuple(reads.values()), makes, run, view))


# Not in the class, where torch would wrap it in what first imports torch._dynamo, for seconds.
_Recorder.__torch_dispatch__ = _Recorder.dispatch


def _is_view(func: Any) -> bool:
    """Of its first argument."""
    made, given = (
        [x.alias_info for x in y] for y in (func._schema.returns, func._schema.arguments)
    )
    return len(made) == 1 and made[0] is not None and not made[0].is_write and given[0] is not None


def _allocation(like: Tensor, made: int) -> Callable[[list, list], None]:
    size, stride = tuple(like.shape), like.stride()
    options: Any = {"dtype": like.dtype, "device": like.device}

    def run(values: list, addresses: list) -> None:
        values[made] = x = torch.empty_strided(size, stride, **options)
        addresses[made] = x.data_ptr()

    return run


class Record:
    """What a call does, to be done again."""

    def __init__(self, taken: _Recorder, inputs: int, result: Any) -> None:
        """result: what it returns, values as places: one, or a tuple or a list."""
        self.operations = taken.operations
        returned = {x.number for x in ((result,) if type(result) is Place else result)}
        needed = set(returned)
        kept: list[Step] = []
        for step in reversed(taken.steps):
            if step.view and not needed.intersection(step.makes):
                continue
            needed.update(step.reads)
            kept.append(step)
        self._room, self._places = _in_one_room(kept[::-1], returned)
        kept = [x for x in kept[::-1] if not self._places.keys() & set(x.makes)]
        self._runs = _with_drops(kept, returned, inputs)
        self._space = [taken.constants.get(n) for n in range(inputs, taken.count)]
        self._device, self._result = taken._device, result

    def play(self, args: Sequence[Any]) -> Any:
        values: list[Any] = [x for x in args if type(x) in _PLAIN]
        values += self._space
        addresses = [0 if x is None else x.data_ptr() for x in values]
        if self._room:
            room = torch.empty(self._room, dtype=torch.uint8, device=self._device)
            base = room.data_ptr()
            for n, at in self._places.items():
                addresses[n] = base + at
        for run, drops in self._runs:
            run(values, addresses)
            for n in drops:
                values[n] = None
        result: Any = self._result
        if type(result) is Place:
            return values[result.number]
        return type(result)([values[x.number] for x in result])


def _in_one_room(steps: Sequence[Step], returned: set[int]) -> tuple[int, dict[int, int]]:
    """Bytes for all fresh memory that only launches read, and where in it each is.

    The largest come first, each at the lowest place that nobody has while it is in use.
    """
    seen = {n for x in steps if not x.launch for n in x.reads} | returned
    first = {x.makes[0]: i for i, x in enumerate(steps) if x.fresh is not None}
    last = {n: i for i, x in enumerate(steps) for n in x.reads}
    sizes = {n: -(-(steps[i].fresh or 1) // _ALIGNED) * _ALIGNED for n, i in first.items()}
    places: dict[int, int] = {}
    for n in sorted(first.keys() - seen, key=lambda n: (-sizes[n], n)):
        begin, end = first[n], last.get(n, first[n])
        met = [x for x in places if first[x] <= end and begin <= last.get(x, first[x])]
        at = 0
        for start, size in sorted((places[x], sizes[x]) for x in met):
            if at + sizes[n] <= start:
                break
            at = max(at, start + size)
        places[n] = at
    room = max((at + sizes[n] for n, at in places.items()), default=0)
    return (room, places) if room <= MOST_ROOM else (0, {})


def _with_drops(
    steps: Sequence[Step], returned: set[int], inputs: int
) -> list[tuple[Callable[[list, list], None], tuple[int, ...]]]:
    """Each step, and the values that nothing later reads."""
    later, found = set(returned), []
    for step in reversed(steps):
        last = tuple({n for n in (*step.reads, *step.makes) if n >= inputs and n not in later})
        later.update(last)
        found.append((step.run, last))
    return found[::-1]


@contextmanager
def _nobody() -> Iterator[None]:
    kept, _THREAD.recorder = recorder(), None
    try:
        yield
    finally:
        _THREAD.recorder = kept


def record(call: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Record | None]:
    """call(*args), and how to do the same again, if that is possible."""
    # each a tensor of its own, also where one is given twice
    mine = [x.detach() if isinstance(x, Tensor) else x for x in args]
    tensors = [x for x in mine if isinstance(x, Tensor)]
    taking, seen = _Recorder(tensors), _Launches()
    with seen, taking:
        _THREAD.recorder = taking
        try:
            result = call(*mine)
        finally:
            _THREAD.recorder = None
    most = max(MOST_OPERATIONS, taking.launches // 2)
    if taking.failed or seen.count != taking.launches or taking.operations > most:
        return result, None
    try:
        if isinstance(result, Tensor):
            places: Any = Place(taking.number(result))
        else:
            places = type(result)([Place(taking.number(x)) for x in result])
    except Unrecordable:
        return result, None
    return result, Record(taking, len(tensors), places)


class _Launches:
    """Counts what Triton launches from this thread."""

    def __enter__(self) -> "_Launches":
        self.count, self._thread = 0, threading.get_ident()
        knobs: Any = sys.modules.get("triton.knobs")  # not before Triton 3.4
        self._hooks = None if knobs is None else knobs.runtime.launch_enter_hook
        if self._hooks is not None:
            self._hooks.add(self._launch)
        return self

    def _launch(self, metadata: Any) -> None:
        if threading.get_ident() == self._thread and recorder() is not None:
            self.count += 1

    def __exit__(self, *_: object) -> None:
        if self._hooks is not None:
            self._hooks.remove(self._launch)
