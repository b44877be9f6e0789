"""Calls like an earlier one, of any size, without what Python works out for each of them.

What an operator allocates, computes and launches follows from the shapes, strides, dtypes and
alignment of its tensors and from its options. The second call of a key, which has no size in it, is
recorded as a function of the sizes (runtime/call_recorder.py): a few dozen lines of Python that
compute sizes, make fresh memory and launch the same kernels. From the third on that function runs.
It begins with the record's guards, and a call of sizes at which the operator decides otherwise gets
a record of its own. A temporary tensor is let go after its last use, as it was before. Those that
only kernels read are places of one allocation, where all of them are small.

A call is not recorded where that would not be all of it: a kernel is launched by other means, an
operation gives a number to the host, or there are more operations of torch than launches pay for.

    SLIPSTREAM_REPLAY   on, or off
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from slipstream.common.checks import is_on
from slipstream.runtime import call_recorder, recording

Key = tuple
ENABLED = is_on("SLIPSTREAM_REPLAY")
# Operations of torch in a record besides fresh memory and views, or half as many as there are
# launches: plain torch that takes over from kernels is not recorded.
MAX_OPERATIONS = 32
# Bytes of temporary tensors that may come in one allocation: it is there until the last is let go.
MAX_WORKSPACE_BYTES = 1 << 23
# Records of a key, of sizes at which an operator decides otherwise: past this it runs as it is.
MAX_RECORDS = 16
# Keys of an operator: past this it starts empty again.
MAX_KEYS = 1024
# Sizes of a record whose consequences are remembered, likewise: those of a model's layers. With 256
# a call of new sizes takes 1.04 times as long on a CPU, for what it stores is in no cache.
MAX_SIZES = 16
_PLAIN = (Tensor, Parameter)
# What a record returns for sizes that its guards refuse.
MISS = object()
# Two sizes that are equal; what is one of its operands.
_EQUAL = re.compile(r"([stxn]\d+(?:_\d+)?) == ([stxn]\d+(?:_\d+)?|\d+)")
_ITSELF = re.compile(r"(\w+) (?:[+-] 0|// 1|\* 1)")


def is_enabled(x: Tensor) -> bool:
    """Whether a call on x may be replayed: elsewhere nothing is launched, and it may depend on
    values."""
    return ENABLED and x.is_cuda


def call_key(args: Sequence[Any]) -> tuple[Key | None, list[Any]]:
    """The key: of tensors dtype, rank, alignment and whether they are contiguous; of integers only
    that they are; None for what can't be one. And the addresses of tensors, for `play`. All tensors
    are on the first one's device."""
    return _reader(tuple(map(type, args)))(args)


@cache
def _reader(kinds: tuple[type, ...]) -> Callable[[Sequence[Any]], tuple[Key | None, list[Any]]]:
    """call_key of arguments of these types, as a function without loops."""
    tensors = [i for i, kind in enumerate(kinds) if issubclass(kind, Tensor)]
    if any(kinds[i] not in _PLAIN for i in tensors):
        return lambda args: (None, [])
    parts = [f"x{i}.dtype, x{i}.dim(), p{i} & 15, x{i}.is_contiguous()" for i in tensors]
    parts += [f"x{i}" for i, kind in enumerate(kinds) if i not in tensors and kind is not int]
    # minus what is in memory: the imaginary part of torch.conj(z). It comes after a real part, so
    # it is never at a multiple of 16 bytes, and only then is it asked.
    addresses = [f"p{i}" if i in tensors else "None" for i in range(len(kinds))]
    lines = [
        f"{''.join(f'x{i}, ' for i in range(len(kinds)))} = args",
        *[f"p{i} = x{i}.data_ptr()" for i in tensors],
        f"addresses = [{', '.join(addresses)}]",
        f"if ({' | '.join(f'p{i}' for i in tensors)}) & 15:",
        f"    if {' or '.join(f'x{i}.is_neg()' for i in tensors)}: return None, addresses",
        f"return (KINDS, x{tensors[0]}.get_device(), {', '.join(parts)}), addresses",
    ]
    alike = tuple(Tensor if i in tensors else kind for i, kind in enumerate(kinds))
    scope: dict[str, Any] = {"KINDS": alike}
    exec("def read(args):\n    " + "\n    ".join(lines), scope)
    return scope["read"]


def _never() -> bool:
    return False


class RecordedCall:
    """A call as a function of its arguments.

    Attributes:
        written: given the call's arguments, those that it writes into; None if it does not.
        is_late: whether a guard may refuse after it has begun.
        source: the function's text.
    """

    written: Callable[[tuple], Any] | None = None

    def __init__(self, taken: call_recorder.CallRecorder, result: str) -> None:
        """result: the text of what it returns."""
        self.operations = taken.operations
        self.source = _Writer(taken, result).text()
        scope: dict[str, Any] = {**taken.constants, "MISS": MISS, "KNOWN": {}}
        scope["remember"], scope["MAX_SIZES"] = remember, MAX_SIZES
        for name in {x for line in taken.lines for x in line.reads if x[0] == "q"}:
            scope[name] = taken.constants[f"c{name[1:]}"].data_ptr()
        scope["W"] = torch.empty(0, dtype=torch.uint8, device=taken.device).new_empty_strided
        scope["stream_of"] = taken.stream
        self.is_profiled = taken.is_profiled or _never
        # sizes that are known only after a launch decide
        self.is_late = taken.late_guards
        exec(compile(self.source, "<slipstream record>", "exec"), scope)
        self._function: Callable[[tuple, Sequence[Any]], Any] = scope["play"]

    def play(self, args: tuple, addresses: Sequence[Any] | None = None) -> Any:
        """Plays the call for these arguments, or returns MISS. addresses: of call_key."""
        if addresses is None:
            addresses = [x.data_ptr() if isinstance(x, Tensor) else None for x in args]
        return self._function(args, addresses)


class Records:
    """The records of a key. due: the next call without one is recorded. closed: none is."""

    def __init__(self, closed: bool = False) -> None:
        self.records: list[RecordedCall] = []
        self.due, self.closed = False, closed


class _Writer:
    """The text of a record's function."""

    def __init__(self, taken: call_recorder.CallRecorder, result: str) -> None:
        self._result, self._args = result, taken.given
        self._lines = _needed(_simplified(taken.lines), result)
        used = {x for line in self._lines for x in line.reads} | {*recording.names_in(result)}
        self._used = used
        self._ranks = taken.ranks
        pointed = {x for x in used if x[0] == "p"}
        seen = {x for line in self._lines if line.kind != "launch" for x in line.reads}
        seen.update(recording.names_in(result))
        self._packed = [
            line
            for line in self._lines
            if line.kind == "fresh"
            and line.size
            and not line.late_size
            and line.left not in seen
            and recording.pointer_of(line.left) in pointed
        ]

    def text(self) -> str:
        """Two functions: of the sizes alone, whose result is remembered, and of the call."""
        early = [x for x in self._lines if not x.late]
        body = [*self._body(())]
        if len(self._packed) > 1:
            room = f"o{len(self._packed)}"
            for i, line in enumerate(self._packed):
                before = f"o{i}" if i else "0"
                size = f"{before} + (({line.size}) + 511 & -512)"  # as torch's allocator aligns
                early.append(recording.Line("let", size, f"o{i + 1}", late=False))
            together = ["    " + x for x in self._body(self._packed, room)]
            body = [f"if {room} <= {MAX_WORKSPACE_BYTES}:", *together, *body]
        read = {x for line in body for x in recording.names_in(line)}
        raw = self._raw()
        inside = [x for line in early for x in line.defines] + [
            x for _, names in raw for x in names
        ]
        wanted = sorted(read.intersection(inside))
        sizes = [f"{', '.join(names)}, = r{i}" for i, (_, names) in enumerate(raw)]
        sizes += [*_written(early), f"return {', '.join(wanted)}{',' if wanted else '()'}"]
        given = [f"{x} = a[{x[1:]}]" for x in sorted(self._args) if self._is_used(x[1:])]
        given += [f"y{x[1:]} = b[{x[1:]}]" for x in sorted(self._args) if f"y{x[1:]}" in read]
        if raw:
            given += [
                f"k = {', '.join(what for what, _ in raw)},",
                "s = KNOWN.get(k)",
                "if s is None: s = remember(KNOWN, k, sizes(*k), MAX_SIZES)",
                "if s is MISS: return MISS",
                *([f"{', '.join(wanted)}, = s"] if wanted else []),
            ]
        signature = ", ".join(f"r{i}" for i in range(len(raw)))
        indent = "\n    "
        return (
            f"def sizes({signature}):{indent}{indent.join(sizes)}\n\n"
            f"def play(a, b):{indent}{indent.join([*given, *body])}\n"
        )

    def _raw(self) -> list[tuple[str, list[str]]]:
        """Shapes, strides and numbers of the arguments that are read, and the names of each."""
        found: list[tuple[str, list[str]]] = []
        used = self._used | {x for line in self._packed for x in recording.names_in(line.size)}
        for name in sorted(self._args):
            for letter, what in (("x", "shape"), ("t", "stride()")):
                sizes = [f"{letter}{name[1:]}_{d}" for d in range(self._ranks[name])]
                if used.intersection(sizes):
                    found.append((f"{name}.{what}", sizes))
        return found + [(f"(a[{x[1:]}],)", [x]) for x in sorted(used) if x[0] == "n"]

    def _is_used(self, n: str) -> bool:
        own = (f"x{n}", f"y{n}")
        return any(x in own or x.startswith((f"x{n}_", f"t{n}_")) for x in self._used)

    def _body(self, packed: Sequence[recording.Line], room: str = "") -> list[str]:
        """packed: fresh memory that comes in one allocation of so much room."""
        lines: list[str] = []
        if packed:
            lines += [f"w = W(({room},), (1,))", "o0 = w.data_ptr()"]
            for i, line in enumerate(packed):
                place = "o0" if i == 0 else f"o0 + o{i}"
                lines.append(f"{recording.pointer_of(line.left)} = {place}")
        if any("stream" in line.text for line in self._lines if line.kind == "launch"):
            lines.append("stream = stream_of()")
        inside = {line.left for line in packed}
        late = [x for x in self._lines if x.late and not (x.kind == "fresh" and x.left in inside)]
        last = self._last_uses(late)

        def after(i: int) -> Iterator[str]:
            for name in late[i].defines:
                if name[0] == "v" and (pointer := recording.pointer_of(name)) in self._used:
                    yield f"{pointer} = {name}.data_ptr()"
            if dropped := last.get(i):
                yield " = ".join([*dropped, "None"])

        return [*lines, *_written(late, after), f"return {self._result}"]

    def _last_uses(self, lines: Sequence[recording.Line]) -> dict[int, list[str]]:
        """The tensors to let go after each line."""
        lasting, last = {*recording.names_in(self._result)}, {}
        # a launch that takes a descriptor reads the memory that it describes
        described = {x.left: x.reads for x in lines if x.kind == "map"}
        for i, line in enumerate(lines):
            memory = [x for name in line.reads for x in described.get(name, ())]
            for name in (*line.defines, *line.reads, *memory):
                tensor = f"v{name[1:]}" if name[0] == "p" else name
                if tensor[0] == "v" and tensor not in lasting:
                    last[tensor] = i
        made = {x for line in lines for x in line.defines}
        found: dict[int, list[str]] = {}
        for name, i in last.items():
            if name in made:
                found.setdefault(i, []).append(name)
        return found


def _written(
    lines: Sequence[recording.Line], after: Callable[[int], Iterable[str]] | None = None
) -> list[str]:
    """Lines as Python, guards in a row as one. after: what follows line i."""
    found: list[str] = []
    guards: list[str] = []
    for i, line in enumerate([*lines, None]):
        if line is not None and line.kind == "guard":
            guards.append(line.text)
            continue
        if guards:
            found.append(f"if not ({' and '.join(guards)}): return MISS")
            guards = []
        if line is not None:
            found.append(f"{line.left} = {line.text}" if line.left else line.text)
            found += after(i) if after else ()
    return found


def remember(known: dict, key: tuple, found: Any, most: int) -> Any:
    """Stores found in `known`, which it empties first at `most` entries, and returns it."""
    if len(known) >= most:
        known.clear()
    known[key] = found
    return found


def _simplified(lines: Sequence[recording.Line]) -> list[recording.Line]:
    """Lines of fewer sizes: one that a guard holds equal to another or to a number is that one from
    there on, what follows from numbers is a number, and nothing is computed twice."""
    same: dict[str, str] = {}
    made: dict[str, str] = {}
    found: list[recording.Line] = []

    def equate(name: str, other: str) -> None:
        other = same.get(other, other)
        same.update({x: other for x, y in same.items() if y == name} | {name: other})

    def is_of_arguments(line: recording.Line) -> bool:
        """Whether a guard compares arguments' own sizes, which hold for all lines."""
        equal = _EQUAL.fullmatch(line.text) if line.kind == "guard" and not line.late else None
        return equal is not None and "s" not in line.text

    for line in sorted(lines, key=is_of_arguments, reverse=True):
        text, size = (recording.renamed(x, same) for x in (line.text, line.size))
        is_number = not recording.names_in(text)
        if line.kind == "let":
            itself = _ITSELF.fullmatch(text)
            other = itself[1] if itself else made.setdefault(text, line.left)
            equate(line.left, repr(eval(text)) if is_number else other)
            if same[line.left] != line.left:
                continue
        elif line.kind == "guard":
            if is_number and eval(text.replace(" is not ", " != ")):
                continue
            equal = None if line.late else _EQUAL.fullmatch(text)
            if equal is not None:
                # an argument's size in the place of one that is computed
                names = sorted(equal.groups(), key=lambda x: (not x.isdigit(), x[0] == "s"))
                equate(names[1], names[0])
                if names[0] == names[1]:
                    continue
        found.append(line._replace(text=text, size=size))
    return found


def _needed(lines: Sequence[recording.Line], result: str) -> list[recording.Line]:
    """Lines without views, sizes and fresh memory that nothing reads."""
    wanted, found = {*recording.names_in(result)}, []
    for line in reversed(lines):
        names = {*line.defines}
        names |= {recording.pointer_of(x) for x in names if x[0] == "v"}
        if line.kind in ("let", "view", "fresh", "map") and not wanted & names:
            continue
        wanted.update(line.reads)
        # a view's memory is in use as long as the view is
        found.append(line)
    return found[::-1]


def record_decision(
    decide: Callable[[], Any], tensors: Sequence[Any]
) -> tuple[Any, RecordedCall | None]:
    """decide(), which looks at the tensors' sizes and computes nothing, and a record of what it
    says for others: the same result, or MISS."""
    given = [x for x in tensors if x is not None]
    if len({*map(id, given)}) < len(given):
        return decide(), None  # a size of one is taken for that of the other
    taking = call_recorder.CallRecorder(tensors, detach=False)
    try:
        with taking, recording.use_recorder(taking):
            result, text = taking.decision(decide())
    finally:
        taking.close()
    if taking.failed or taking.operations or taking.launches:
        return result, None
    return result, RecordedCall(taking, text)


def record(
    call: Callable[..., Any],
    args: Sequence[Any],
    max_operations: int | None = MAX_OPERATIONS,
    detach: bool = True,
) -> tuple[Any, RecordedCall | None]:
    """call(*args), and how to do the same for other tensors, if that is possible. detach: as
    CallRecorder."""
    taking, seen = call_recorder.CallRecorder(args, detach), recording.LaunchCounter()
    with seen, taking, recording.use_recorder(taking):
        result = call(*taking.args)
    taking.close()
    if taking.failed or seen.count != taking.launches:
        return result, None
    if max_operations is not None and taking.operations > max(max_operations, taking.launches // 2):
        return result, None
    try:
        text = taking.result(result)
    except recording.Unrecordable:
        return result, None
    return result, RecordedCall(taking, text)
