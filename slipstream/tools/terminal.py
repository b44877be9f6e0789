"""Progress bars and tables of the commands."""

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

STATUSES = {
    "ok": "compiles, fits into shared memory, hardly spills, uses the tensor cores",
    "slow": "compiles and fits, but spills registers or misses the tensor cores",
    "refused": "the compiler refuses it or it does not fit: such calls run in plain torch",
    "hang": "the compiler does not finish",
    "crash": "the compiler dies",
    "torch": "no kernel takes it there, plain torch does",
    "-": "not looked at",
}
"""What the matrix and precompile say of a kernel."""


def bar(console: Console | None = None) -> Progress:
    """A bar for each task with its count and the time spent, on stderr; nothing where nobody looks.

    Use as a context manager; what is printed meanwhile goes above it.
    """
    console = console or Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def counts(statuses: Iterable[str]) -> str:
    """As "120 ok, 3 slow"."""
    found = Counter(statuses)
    return ", ".join(f"{found[x]} {x}" for x in STATUSES if found[x]) or "none"


def legend(statuses: Iterable[str]) -> str:
    """The meaning of each status, a line each."""
    seen = set(statuses)
    return "\n".join(f"{x}: {what}" for x, what in STATUSES.items() if x in seen)


def columns(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Lines of aligned columns; the last is as long as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (indent + "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
