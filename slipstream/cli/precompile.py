"""slipstream precompile: fills Triton's cache where there is no GPU."""

from pathlib import Path
from typing import Annotated

import typer


def precompile(
    operators: Annotated[
        list[str] | None,
        typer.Argument(help="names such as kda or chunk_kda; without any, every operator"),
    ] = None,
    arch: Annotated[str, typer.Option(help="the GPU's architecture, such as sm_90")] = "sm_90",
    dtype: Annotated[str, typer.Option(help="of the activations, such as bf16,fp32")] = "bf16",
    head_dim: Annotated[
        str, typer.Option(help="widths of heads, K or KxV, such as 64,128x256")
    ] = "128",
    packed: Annotated[
        bool | None,
        typer.Option(help="only calls with cu_seqlens, or only those without; by default both"),
    ] = None,
    state: Annotated[
        bool | None, typer.Option(help="only calls with an initial state, or only those without")
    ] = None,
    grouped: Annotated[
        bool | None, typer.Option(help="only calls with more heads of v than of q, or only others")
    ] = None,
    forward: Annotated[bool, typer.Option(help="compile no kernels of gradients")] = False,
    cache: Annotated[
        Path | None, typer.Option(help="a folder for the cache; by default Triton's own")
    ] = None,
    jobs: Annotated[int, typer.Option(help="how many compilers run at once")] = 2,
) -> None:
    """Compile kernels ahead of time, so that first calls compile nothing."""
    from slipstream.cli.errors import need_triton, reported

    with reported():
        need_triton()
        from slipstream.compiler.arch import named
        from slipstream.tools import precompile_cache
        from slipstream.tools.catalog import chosen

        flags = precompile_cache.Flags(packed, state, grouped)
        shapes = precompile_cache.shapes(dtype.split(","), head_dim.split(","), flags)
        samples, target = chosen(operators), named(arch).name
        if not precompile_cache.fill(samples, shapes, target, cache, jobs, backward=not forward):
            raise typer.Exit(1)
