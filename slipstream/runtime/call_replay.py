"""Calls just like an earlier one, without what Python works out for each of them.

What an operator allocates, computes and launches follows from the shapes, strides, dtypes and
alignment of its tensors and from its options: Key. The second call of a key is recorded: each
operation of torch by the values that it reads and makes, each launch of a kernel by the places of
its tensors (runtime/call_recorder.py). From the third on the record is played: fresh memory, the
same launches, other addresses, those in a row as one (runtime/launch_replay.py). A temporary tensor
is let go after its last use, as it was before. Those that only kernels see are places of one
allocation, where all of them are small.

A call is not recorded where that would not be all of it: a kernel is launched by other means, an
operation gives a number to the host, or there are more operations of torch than launches pay for.

    SLIPSTREAM_REPLAY   on, or off
"""

import os
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from slipstream.runtime.call_recorder import (
    CallRecorder,
    Launch,
    LaunchCounter,
    LaunchStep,
    RecordedStep,
    Run,
    Unrecordable,
    ValueRef,
    allocation,
    use_recorder,
)

Key = tuple
ENABLED = os.environ.get("SLIPSTREAM_REPLAY", "on") != "off"
# Operations of torch in a record besides fresh memory and views, each of which takes as long as a
# launch: so many, or half as many as there are launches.
MAX_OPERATIONS = 6
# Bytes of temporary tensors that may come in one allocation: it is there until the last is let go.
MAX_WORKSPACE_BYTES = 1 << 23
_ALIGNED = 512  # as torch's allocator does
# Keys of an operator: past this it starts empty again.
MAX_KEYS = 1024
_PLAIN = (Tensor, Parameter)
# most of what else there is: isinstance takes longer
_NO_TENSOR = frozenset((bool, int, float, str))


def is_enabled(x: Tensor) -> bool:
    """Whether a call on x may be replayed: elsewhere nothing is launched, and it may depend on
    values."""
    return ENABLED and x.is_cuda


def call_key(args: Sequence[Any]) -> tuple[Key | None, list[Any], list[int]]:
    """The key, None for what can't be one, and the tensors and their addresses, for `play`. All
    tensors are on the first one's device."""
    parts: list[Any] = [args[0].get_device()]
    values, addresses = [], []
    for x in args:
        if x is None:
            parts.append(None)
            continue
        kind = type(x)
        if kind in _PLAIN:
            address = x.data_ptr()
            place = address & 15
            # minus what is in memory: the imaginary part of torch.conj(z). It comes after a real
            # part, so it is never at a multiple of 16 bytes, and only then is it asked.
            if place and x.is_neg():
                return None, [], []
            parts += (x.shape, x.stride(), x.dtype, place)
            values.append(x)
            addresses.append(address)
        elif kind in _NO_TENSOR or not isinstance(x, Tensor):
            parts.append(x)
        else:
            return None, [], []
    return tuple(parts), values, addresses


def compile_class_key(args: Sequence[Any]) -> Key:
    """The part of call_key that no number of sequences, tokens or heads changes."""
    parts: list[Any] = []
    for x in args:
        shaped = isinstance(x, Tensor)
        parts += (x.dtype, x.dim(), x.shape[3:], x.data_ptr() & 15) if shaped else (x,)
    return tuple(parts)


class RecordedCall:
    """The launches and allocations of a call, recorded to be repeated.

    Attributes:
        written: given the call's arguments, those that it writes into; None if it does not.
    """

    written: Callable[[tuple], Any] | None = None

    def __init__(self, taken: CallRecorder, inputs: int, result: Any) -> None:
        """result: what it returns, values as places: one, or a tuple or a list of them and None;
        None where it writes into its arguments alone."""
        self.operations = taken.operations
        results = (result,) if type(result) is ValueRef else result or ()
        returned = {x.number for x in results if x is not None}
        # whether all results are memory of their own, and none is a view
        made = {x.makes[0] for x in taken.steps if x.make is not None}
        self.makes_results = returned <= made
        steps = _drop_dead_views(taken.steps, returned)
        self._room, places = _pack_workspace(steps, returned)
        stays = returned
        if self._room:
            stays = returned | {taken.count}  # until the end: it is small
            steps = _rebase(steps, places, taken.count)
            make = allocation((self._room,), (1,), torch.uint8, taken.device)
            steps.insert(0, RecordedStep((), (taken.count,), make=make, fresh=self._room))
        self._runs = _group_launches(_hoist_allocations(_add_liveness(steps, stays, inputs)))
        # values that are there before the first step, and their addresses
        self._space = [taken.constants.get(n) for n in range(inputs, taken.count + 1)]
        self._at = [0 if x is None else x.data_ptr() for x in self._space]
        self._result = result

    def play(self, values: list[Any], addresses: list[int]) -> Any:
        """Repeats the call with call_key's values and addresses; empties both lists."""
        values += self._space
        addresses += self._at
        for made, run, drops in self._runs:
            if made is None:
                run(values, addresses)
            else:
                values[made] = x = run()
                addresses[made] = x.data_ptr()
            for n in drops:
                values[n] = None
        result: Any = self._result
        if type(result) is ValueRef:
            return values[result.number]
        if result is None:
            return None
        return type(result)([None if x is None else values[x.number] for x in result])


def _drop_dead_views(steps: Sequence[RecordedStep], returned: set[int]) -> list[RecordedStep]:
    """All but the views that only launches read."""
    needed, steps_needed = set(returned), []
    for step in reversed(steps):
        if step.view and not needed.intersection(step.makes):
            continue
        needed.update(step.reads)
        steps_needed.append(step)
    return steps_needed[::-1]


def _pack_workspace(
    steps: Sequence[RecordedStep], returned: set[int]
) -> tuple[int, dict[int, int]]:
    """Bytes for all fresh memory that only launches read, and where in it each is.

    The largest come first, each at the lowest place that is free while it is in use.
    """
    seen = {n for x in steps if x.launch is None for n in x.reads} | returned
    first = {x.makes[0]: i for i, x in enumerate(steps) if x.fresh is not None}
    last = {n: i for i, x in enumerate(steps) for n in x.reads}
    sizes = {n: -(-(steps[i].fresh or 1) // _ALIGNED) * _ALIGNED for n, i in first.items()}
    places: dict[int, int] = {}
    for n in sorted(first.keys() - seen, key=lambda n: (-sizes[n], n)):
        begin, end = first[n], last.get(n, first[n])
        overlapping = [x for x in places if first[x] <= end and begin <= last.get(x, first[x])]
        at = 0
        for start, size in sorted((places[x], sizes[x]) for x in overlapping):
            if at + sizes[n] <= start:
                break
            at = max(at, start + size)
        places[n] = at
    room = max((at + sizes[n] for n, at in places.items()), default=0)
    return (room, places) if room <= MAX_WORKSPACE_BYTES else (0, {})


def _rebase(steps: Sequence[RecordedStep], places: dict[int, int], room: int) -> list[RecordedStep]:
    """The steps, with memory in the value `room` for what has a place in it."""

    def moved(place: ValueRef) -> ValueRef:
        at = places.get(place.number)
        return place if at is None else ValueRef(room, at + place.offset)

    found: list[RecordedStep] = []
    for step in steps:
        if step.launch is not None:
            launch = step.launch._replace(places=tuple(map(moved, step.launch.places)))
            step = RecordedStep(tuple(n for n, _ in launch.places), launch=launch)
        if not places.keys() & set(step.makes):
            found.append(step)
    return found


Dropping = tuple[RecordedStep, tuple[int, ...]]


def _add_liveness(steps: Sequence[RecordedStep], stays: set[int], inputs: int) -> list[Dropping]:
    """Each step, and the values that nothing later reads."""
    later, found = set(stays), []
    for step in reversed(steps):
        last = tuple({n for n in (*step.reads, *step.makes) if n >= inputs and n not in later})
        later.update(last)
        found.append((step, last))
    return found[::-1]


def _hoist_allocations(steps: Sequence[Dropping]) -> list[Dropping]:
    """Fresh memory and views come before launches after which nothing is let go: so more launches
    are in a row, and no more memory is in use at once."""
    found: list[Dropping] = []
    for step, drops in steps:
        at = len(found)
        while step.launch is None and (step.view or step.fresh is not None) and at:
            before, dropped = found[at - 1]
            if before.launch is None or dropped:
                break
            at -= 1
        found.insert(at, (step, drops))
    return found


# What is done, and the values that are let go after it: fresh memory made, the number of its value,
# or anything else run.
Doing = tuple[int | None, Any, tuple[int, ...]]


def _group_launches(steps: Sequence[Dropping]) -> list[Doing]:
    """Launches in a row are one."""
    found: list[Doing] = []
    for together, group in groupby(steps, lambda x: x[0].launch and x[0].launch.together):
        row = list(group)
        if together is None:
            for step, drops in row:
                made = None if step.make is None else step.makes[0]
                found.append((made, step.make or step.run, drops))
        else:
            run = _fuse_launches([step.launch for step, _ in row if step.launch is not None])
            found.append((None, run, tuple(n for _, drops in row for n in drops)))
    return found


def _fuse_launches(launches: Sequence[LaunchStep]) -> Run:
    places = list(dict.fromkeys(place for x in launches for place in x.places))
    known = {place: i for i, place in enumerate(places)}
    each = [(x.again, [known[place] for place in x.places]) for x in launches]
    again: Launch = launches[0].together(each)
    plain = list(map(tuple, places))  # these are taken apart faster

    def run(values: list, addresses: list) -> None:
        again([addresses[n] + at for n, at in plain])

    return run


def record(
    call: Callable[..., Any], args: Sequence[Any], max_operations: int | None = MAX_OPERATIONS
) -> tuple[Any, RecordedCall | None]:
    """call(*args), and how to do the same again, if that is possible."""
    # each a tensor of its own, also where one is given twice
    mine = [x.detach() if isinstance(x, Tensor) else x for x in args]
    tensors = [x for x in mine if isinstance(x, Tensor)]
    taking, seen = CallRecorder(tensors), LaunchCounter()
    with seen, taking, use_recorder(taking):
        result = call(*mine)
    if taking.failed or seen.count != taking.launches:
        return result, None
    if max_operations is not None and taking.operations > max(max_operations, taking.launches // 2):
        return result, None
    try:
        if isinstance(result, Tensor):
            places: Any = ValueRef(taking.number(result))
        elif result is None:
            places = None
        else:
            each = (None if x is None else ValueRef(taking.number(x)) for x in result)
            places = type(result)(each)
    except Unrecordable:
        return result, None
    return result, RecordedCall(taking, len(tensors), places)
