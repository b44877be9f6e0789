"""The subcommands of `slipstream`: one file each, which imports what it needs when it runs."""

import inspect
import re
from typing import Annotated

import typer

from slipstream.cli.convert import convert
from slipstream.cli.doctor import doctor
from slipstream.cli.explain import explain
from slipstream.cli.generate import generate
from slipstream.cli.precompile import precompile
from slipstream.cli.train import train

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
for command in (train, generate, convert, doctor, explain, precompile):
    # rich breaks lines where docstrings do
    paragraphs = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")
    app.command(help=paragraphs)(command)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print it and exit")] = False,
) -> None:
    """Attention kernels for PyTorch, and the language models built from them."""
    if version:
        from slipstream import __version__

        typer.echo(f"slipstream {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
