"""slipstream precompile: fills Triton's cache where there is no GPU."""

from pathlib import Path
from typing import Annotated

import typer


def precompile(
    operators: Annotated[
        list[str] | None, typer.Argument(help="such as kda or chunk_kda; all of them if none")
    ] = None,
    arch: Annotated[str, typer.Option(help="the GPU's architecture, as sm_90")] = "sm_90",
    dtype: Annotated[str, typer.Option(help="of the activations, as bf16,fp32")] = "bf16",
    head_dim: Annotated[str, typer.Option(help="K, or KxV, as 64,128x256")] = "128",
    packed: Annotated[bool | None, typer.Option(help="calls with cu_seqlens")] = None,
    state: Annotated[bool | None, typer.Option(help="calls with an initial state")] = None,
    grouped: Annotated[bool | None, typer.Option(help="calls with more heads of v")] = None,
    forward: Annotated[bool, typer.Option(help="leave gradients out")] = False,
    cache: Annotated[Path | None, typer.Option(help="Triton's cache; else its usual place")] = None,
    jobs: Annotated[int, typer.Option(help="compiler processes at once")] = 2,
) -> None:
    """Compile what calls will want, so that the first call in production compiles nothing."""
    from slipstream.cli.errors import reported

    with reported():
        from slipstream.compiler.arch import named
        from slipstream.tools import precompile_cache
        from slipstream.tools.catalog import chosen

        flags = precompile_cache.Flags(packed, state, grouped)
        shapes = precompile_cache.shapes(dtype.split(","), head_dim.split(","), flags)
        samples, target = chosen(operators), named(arch).name
        if not precompile_cache.fill(samples, shapes, target, cache, jobs, backward=not forward):
            raise typer.Exit(1)
