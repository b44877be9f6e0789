"""Progress bars and tables of the commands."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


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


def columns(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Lines of aligned columns; the last is as long as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (indent + "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
