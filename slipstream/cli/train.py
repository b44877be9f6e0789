"""slipstream train CONFIG.yaml [section.key=value ...]"""

import logging
import os
from pathlib import Path
from typing import Annotated

import typer


def train(
    config: Annotated[Path, typer.Argument(help="a run's YAML file, such as configs/hybrid.yaml")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, such as training.max_steps=100")
    ] = None,
    fresh: Annotated[
        bool, typer.Option(help="fail if the run has begun before, instead of continuing it")
    ] = False,
) -> None:
    """Train a language model on text files, or continue a run that was interrupted.

    Ctrl-C (or SIGTERM) finishes the step, saves a checkpoint and stops; the same command then
    continues, and ends with the same weights, bit for bit on a CPU.
    """
    from slipstream.cli.errors import reported
    from slipstream.training.interrupt import Interrupt

    with Interrupt() as interrupt, reported():
        from rich.console import Console

        from slipstream.training import ranks
        from slipstream.training.config import load
        from slipstream.training.run import train as run

        # torchrun numbers its processes: the first one speaks, and torch warns there alone
        first = os.environ.get("RANK", "0") == "0"
        console = Console(quiet=not first)
        if not first:
            logging.getLogger("torch.distributed").setLevel(logging.ERROR)
        result = run(load(config, overrides or ()), interrupt, console, fresh)
        ranks.leave()
        if result.held_out is None:
            console.print(
                f"stopped after step {result.step}, nothing lost; the same command continues",
                highlight=False,
            )
        else:
            console.print(
                f"[bold]{result.held_out:.4f} bits per byte[/bold] on all held-out text; "
                f"{result.tokens_per_second:,.0f} tokens/s; model in {result.directory}",
                highlight=False,
            )
