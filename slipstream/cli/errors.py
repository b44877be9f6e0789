"""How a command says that its input was wrong: one line, without a traceback."""

import importlib.util
import os
import sys
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
    except BrokenPipeError as error:  # such as by `| head`: nothing reads on, nothing is wrong
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  flushed as the interpreter ends
        raise typer.Exit(1) from error
    except (ValueError, TypeError, OSError, NotImplementedError) as error:
        typer.secho(f"error: {' '.join(str(error).split())}", fg="red", err=True)
        raise typer.Exit(2) from error


def need_triton() -> None:
    """Raises ModuleNotFoundError where there is no Triton, which makes and compiles the kernels."""
    if importlib.util.find_spec("triton") is None:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")
