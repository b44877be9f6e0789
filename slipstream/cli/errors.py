"""How a command says that its input was wrong: one line, without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from slipstream.cli import not_installed


@contextmanager
def reported() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        typer.secho(not_installed(error), fg="red", err=True)
        raise typer.Exit(1) from error
    except (ValueError, TypeError, OSError, NotImplementedError) as error:
        typer.secho(f"error: {' '.join(str(error).split())}", fg="red", err=True)
        raise typer.Exit(2) from error
