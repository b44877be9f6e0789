"""slipstream matrix: every kernel for every architecture and Triton release, without a GPU."""

import json
from pathlib import Path
from typing import Annotated

import typer


def matrix(
    operators: Annotated[
        list[str] | None,
        typer.Argument(help="names such as kda or chunk_kda; without any, every operator"),
    ] = None,
    arch: Annotated[
        str, typer.Option(help="architectures, such as sm_80,sm_90; by default all")
    ] = "",
    triton: Annotated[
        str,
        typer.Option(help="releases of Triton, such as 3.6.0,3.7.1; by default the installed one"),
    ] = "",
    jobs: Annotated[int, typer.Option(help="how many compilers run at once")] = 2,
    timeout: Annotated[
        float, typer.Option(help="seconds after which a compiler is stopped")
    ] = 180.0,
    shapes: Annotated[int, typer.Option(help="how many of the 12 sample shapes")] = 7,
    forward: Annotated[bool, typer.Option(help="compile no kernels of gradients")] = False,
    kernels: Annotated[bool, typer.Option(help="print a line for every kernel")] = False,
    out: Annotated[
        Path | None, typer.Option("--json", help="a file for the rows of all kernels")
    ] = None,
    variants: Annotated[
        str,
        typer.Option(
            help="which variants of each kernel: few, flags, pairs (of flags), all, or auto"
        ),
    ] = "auto",
    recompile: Annotated[
        bool, typer.Option("--all", help="compile what has not changed since the last run, too")
    ] = False,
) -> None:
    """Compile every kernel ahead of time and check shared memory, spills and tensor cores."""
    from slipstream.cli.errors import need_triton, reported

    with reported():
        if not triton:  # a release that is named is installed first
            need_triton()
        from slipstream.compiler.arch import ARCHS, named
        from slipstream.compiler.support_matrix import as_json
        from slipstream.runtime.files import write_text
        from slipstream.tools.catalog import FURTHER, REPRESENTATIVE, chosen
        from slipstream.tools.matrix_run import MatrixRun, line

        if shapes < 1:
            raise ValueError(f"--shapes: want at least 1, got {shapes}")
        archs = [named(x).name for x in arch.split(",")] if arch else list(ARCHS)
        sizes = (*REPRESENTATIVE, *FURTHER)[:shapes]
        if out is not None:
            out.open("a").close()  # better now than after the run
        run = MatrixRun(chosen(operators), sizes, archs, not forward, variants)
        rows = []
        for release in triton.split(",") if triton else [None]:
            found = run.compile(release, jobs, timeout, recompile)
            rows += found
            for row in found if kernels else ():
                typer.echo(line(row))
        if out is not None:
            write_text(out, json.dumps([as_json(x) for x in rows], indent=1) + "\n")
        if run.failures or any(x.status in ("crash", "hang") for x in rows):
            raise typer.Exit(1)
