"""How a command says that its input was wrong: one line, without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def reported() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, OSError, NotImplementedError) as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
