"""Words that recorders of calls, launches and records share: runtime/call_recorder.py records,
runtime/call_replay.py writes the function."""

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from slipstream.runtime.launch_cache import of_thread

_NAME = re.compile(r"\b[a-zA-Z]\d+(?:_\d+)?\b")


class Unrecordable(Exception):
    pass


class Recorder(Protocol):
    """Receiver of launches and sizes: CallRecorder says of which."""

    STREAM: Any
    stream: Callable[[], Any] | None
    is_profiled: Callable[[], bool] | None

    def launched(
        self, run: Callable[..., Any] | None, args: Sequence[Any], maps: Sequence[Any] = ()
    ) -> None: ...

    def ask(self, policy: Callable[..., Any], args: tuple) -> Any: ...

    def pinned(self, x: Any) -> Any: ...

    def plain(self, x: Any) -> Any: ...

    def guard_number(self, x: Any, specialized: bool) -> None: ...


class Line(NamedTuple):
    """A line of the record, `left = text`.

    kind: let, guard, fresh, view, step (an operation of torch), map (a descriptor for TMA) or
    launch. late: it stays behind the steps before it. size: of fresh memory, in bytes.
    """

    kind: str
    text: str
    left: str = ""
    late: bool = True
    size: str = ""
    late_size: bool = False

    @property
    def defines(self) -> list[str]:
        return names_in(self.left)

    @property
    def reads(self) -> list[str]:
        return names_in(f"{self.text} {self.size}")


def pointer_of(name: str) -> str:
    """The name of a tensor's address."""
    return {"v": "p", "x": "y", "c": "q"}[name[0]] + name[1:]


def names_in(text: str) -> list[str]:
    return _NAME.findall(text)


def renamed(text: str, names: Mapping[str, str]) -> str:
    """The text with other names, or numbers, for some."""

    def other(name: re.Match[str]) -> str:
        found = names.get(name[0], name[0])
        apart = found[0] == "-" or (found.isdigit() and text.startswith(".", name.end()))
        return f"({found})" if apart else found  # as in (8).bit_length() and 3 * (-8)

    return _NAME.sub(other, text)


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
