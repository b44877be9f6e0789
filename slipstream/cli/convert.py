"""slipstream convert SOURCE TARGET [--to MODEL]"""

from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[Path, typer.Argument(help="directory of a checkpoint")],
    target: Annotated[Path, typer.Argument(help="directory to write, which is not there yet")],
    to: Annotated[
        str, typer.Option(help="slipstream, or the model to make of one of Slipstream's")
    ] = "slipstream",
    ignore: Annotated[
        list[str] | None, typer.Option(help="a key of the source's config that changes nothing")
    ] = None,
) -> None:
    """Convert a checkpoint of fla or transformers to Slipstream's model, or back.

    Known are fla's gla, retnet, delta_net, gated_deltanet, kda, rwkv7 and fla_mamba2, and
    transformers' qwen3_next, kimi_linear and mamba2. The logits stay the same; what the other
    model has no place for is an error.
    """
    from slipstream.cli.errors import reported

    with reported():
        import transformers

        from slipstream.models.convert import convert as run
        from slipstream.tools.terminal import bar

        transformers.logging.set_verbosity_error()
        with bar() as progress:
            task = progress.add_task("weights converted", total=None)

            def shown(steps: int, of: int) -> None:
                progress.update(task, completed=steps, total=of)

            done = run(source, target, to, ignore or (), shown=shown)
        typer.echo(
            f"{done.source} to {done.target}: {done.parameters:,} parameters, "
            f"{done.weight_bytes / 1e6:,.1f} MB in {target}"
        )
