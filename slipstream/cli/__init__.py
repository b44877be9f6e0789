"""The command `slipstream`: one file per subcommand, each importing what it needs when it runs."""

import typer

from slipstream.cli.doctor import doctor
from slipstream.cli.explain import explain
from slipstream.cli.generate import generate
from slipstream.cli.matrix import matrix
from slipstream.cli.precompile import precompile
from slipstream.cli.train import train

app = typer.Typer(
    help="Attention kernels for PyTorch, and the language models built from them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
for command in (train, generate, doctor, explain, matrix, precompile):
    app.command()(command)


@app.callback()
def _root() -> None:
    """Keeps subcommands subcommands, however few there are."""


def main() -> None:
    app()
