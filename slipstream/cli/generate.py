"""slipstream generate CHECKPOINT PROMPT"""

from pathlib import Path
from typing import Annotated

import typer


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="directory of a model, or of a training run")],
    prompt: Annotated[str, typer.Argument(help="text to continue")],
    tokens: Annotated[int, typer.Option(help="how many at most")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token")] = 0.8,
    top_p: Annotated[float, typer.Option(help="sample from this share of the probability")] = 0.95,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
) -> None:
    """Continue a text, printed as it is made."""
    from slipstream.cli.errors import reported

    with reported():
        from slipstream.training.sample import load, stream

        model, tokenizer = load(checkpoint)
        speed = stream(model, tokenizer, prompt, tokens, temperature, top_p, seed)
        typer.secho(f"{speed:,.0f} tokens/s", err=True, dim=True)
