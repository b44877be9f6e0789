"""What runs on slipstream in this process in the place of other libraries' functions: report()."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from threading import Lock
from typing import Any, TypeVar

from torch.compiler import is_compiling

from slipstream.runtime import dispatch

F = TypeVar("F", bound=Callable[..., Any])
# by which a function refuses a call
REFUSALS = (NotImplementedError, TypeError, ValueError)
# of a place, or of all that was not replaced: messages may have sizes of a call in them
MAX_REASONS = 64
OTHERS = "other reasons"


class Site:
    """Calls in one place. refused: why a call was not ours, and how often."""

    def __init__(self) -> None:
        # one step of the interpreter, so that threads need no lock
        self.count = itertools.count().__next__
        self.refused: Counter[str] = Counter()
        self._reads = 0

    def refuse(self, why: object) -> bool:
        """Counts a call that was not ours; whether it is the first for this reason."""
        with _lock:
            reason = str(why)
            if reason not in self.refused and len(self.refused) >= MAX_REASONS:
                reason = OTHERS
            self.refused[reason] += 1
            return self.refused[reason] == 1

    def calls(self) -> int:
        with _lock:
            self._reads += 1
            return self.count() - self._reads + 1


@dataclass(frozen=True)
class Row:
    """calls: that slipstream took. refused: why it did not take others -> how many; after
    MAX_REASONS reasons the rest are OTHERS."""

    library: str
    name: str
    calls: int
    refused: dict[str, int]


@dataclass(frozen=True)
class Report:
    """rows: what was replaced. not_replaced: libraries whose own stays, and why. kernels: kinds of
    calls that ran in plain torch on a GPU, and why."""

    rows: tuple[Row, ...]
    not_replaced: tuple[tuple[str, str], ...]
    kernels: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            lines.append(f"{row.library} {row.name}: {row.calls} calls")
            lines += [f"  not ours, {n} times: {why}" for why, n in row.refused.items()]
        lines += [f"{library}: not replaced: {why}" for library, why in self.not_replaced]
        lines += [f"plain torch instead of {kind}: {why}" for kind, why in self.kernels]
        return "\n".join(lines) or "nothing of this process runs on slipstream by an integration"


_lock = Lock()
_sites: dict[tuple[str, str], Site] = {}
_not_replaced: dict[tuple[str, str], None] = {}


def report() -> Report:
    """Which functions of vLLM, SGLang, torchtitan, transformers and fla run on slipstream in this
    process, with how many calls, and what was refused and why.

    Calls are counted where Python makes them: not within torch.compile, and not when a CUDA graph
    is replayed. A call whose kernel fails is counted, and the kernel is listed.
    """
    rows = [Row(*k, at.calls(), dict(at.refused)) for k, at in sorted(_sites.items())]
    return Report(tuple(rows), tuple(_not_replaced), tuple(sorted(dispatch.reported)))


def site(library: str, name: str) -> Site:
    """The place of this name, which the report has from now on."""
    return _sites.get((library, name)) or _sites.setdefault((library, name), Site())


def refuse(library: str, why: object) -> None:
    """The library's own stays."""
    error = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else str(why)
    is_new = (library, error) not in _not_replaced
    _not_replaced[library, OTHERS if is_new and len(_not_replaced) >= MAX_REASONS else error] = None


def remove(library: str) -> None:
    """Nothing of a library is replaced any more."""
    for key in [x for x in _sites if x[0] == library]:
        del _sites[key]


def counted(library: str, name: str) -> Callable[[F], F]:
    """Decorator: the calls of a function of ours, and by which errors it refused some."""

    def decorate(function: F) -> F:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return function(*args, **kwargs)
            try:
                result = function(*args, **kwargs)
            except REFUSALS as error:
                site(library, name).refuse(error)
                raise
            site(library, name).count()
            return result

        return call  # type: ignore[return-value]

    return decorate
