"""slipstream generate CHECKPOINT PROMPT"""

from pathlib import Path
from typing import Annotated

import typer


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="directory of a model, or of a training run")],
    prompt: Annotated[str | None, typer.Argument(help="text to continue")] = None,
    file: Annotated[
        Path | None, typer.Option(help="continue every line of this file instead")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="lines of the file at once")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="how many at most")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token")] = 0.8,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="sample from this share of the probability")
    ] = 0.95,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
) -> None:
    """Continue a text, printed as it is made, or every line of a file; tokens/s at the end."""
    from slipstream.cli.errors import reported

    with reported():
        if (prompt is None) == (file is None):
            raise ValueError("prompt: want either a prompt or --file, got both or none")
        from slipstream.runtime.files import read_text
        from slipstream.training import sample

        prompts = [prompt] if prompt is not None else []
        if file is not None:
            prompts = [x for x in read_text(file).splitlines() if x.strip()]
        speed = sample.generate(
            *sample.load(checkpoint),
            prompts,
            batch,
            tokens=tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
        typer.secho(f"{speed:,.0f} tokens/s", err=True, dim=True)
