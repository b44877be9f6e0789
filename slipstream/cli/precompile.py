"""slipstream precompile: fills Triton's cache where there is no GPU."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer


def precompile(
    operators: Annotated[
        list[str] | None,
        typer.Argument(
            help="names such as kda or chunk_kda, or models: folders, config.json or a run's YAML "
            "file; without any, every operator"
        ),
    ] = None,
    arch: Annotated[str, typer.Option(help="the GPU's architecture, such as sm_90")] = "sm_90",
    dtype: Annotated[str, typer.Option(help="of the activations, such as bf16,fp32")] = "bf16",
    head_dim: Annotated[
        str, typer.Option(help="widths of heads, K or KxV, such as 64,128x256")
    ] = "128",
    batch: Annotated[str, typer.Option(help="rows x tokens of a model's training step")] = "8x4096",
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
        from slipstream.tools import precompile_cache as tool
        from slipstream.tools.catalog import chosen

        given, target, types = operators or [], named(arch).name, tool.dtypes(dtype)
        sizes = tool.batch(batch)
        models = [x for x in given if tool.is_model(x)]
        names = [x for x in given if x not in models]
        done = True
        if models:
            from slipstream.tools.model_kernels import find_model_kernels

            of_models = partial(find_model_kernels, models, types, sizes, target, not forward)
            done = tool.fill(of_models, f"{len(models)} models", target, cache, jobs)
        if names or not models:
            flags, samples = tool.Flags(packed, state, grouped), chosen(names or None)
            shapes = tool.shapes(types, head_dim.split(","), flags)
            of_operators = partial(tool.find_operators, samples, shapes, target, not forward)
            what = f"{len(samples)} operators"
            done = tool.fill(of_operators, what, target, cache, jobs) and done
        if not done:
            raise typer.Exit(1)
