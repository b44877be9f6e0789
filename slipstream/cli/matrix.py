"""slipstream matrix: every kernel for every architecture and Triton release, without a GPU."""

import json
from pathlib import Path
from typing import Annotated

import typer


def matrix(
    operators: Annotated[
        list[str] | None, typer.Argument(help="such as kda or chunk_kda; all of them if none")
    ] = None,
    arch: Annotated[str, typer.Option(help="architectures, as sm_80,sm_90; all if empty")] = "",
    triton: Annotated[str, typer.Option(help="releases, as 3.6.0,3.7.1; else what is here")] = "",
    jobs: Annotated[int, typer.Option(help="compiler processes at once")] = 2,
    timeout: Annotated[float, typer.Option(help="seconds for one kernel")] = 180.0,
    shapes: Annotated[int, typer.Option(help="how many sample shapes, of 12; telling first")] = 7,
    forward: Annotated[bool, typer.Option(help="leave gradients out")] = False,
    kernels: Annotated[bool, typer.Option(help="a line for every kernel")] = False,
    out: Annotated[Path | None, typer.Option("--json", help="every kernel's row goes here")] = None,
    variants: Annotated[
        str,
        typer.Option(help="of each kernel, between them: auto, few, flags, pairs (of flags), all"),
    ] = "auto",
    anew: Annotated[
        bool, typer.Option("--all", help="compile again what has not changed since the last run")
    ] = False,
    record: Annotated[
        bool, typer.Option(help="write docs/SUPPORT.md and what guarded compilation trusts")
    ] = False,
) -> None:
    """Compile every kernel ahead of time and check shared memory, spills and tensor cores."""
    from slipstream.cli.errors import reported

    with reported():
        from slipstream.compiler.arch import ARCHS, named
        from slipstream.compiler.support_matrix import as_json
        from slipstream.runtime.files import write_text
        from slipstream.tools import support_page
        from slipstream.tools.catalog import FURTHER, REPRESENTATIVE, chosen

        if shapes < 1:
            raise ValueError(f"--shapes: want at least 1, got {shapes}")
        samples = chosen(operators)
        archs = [named(x).name for x in arch.split(",")] if arch else list(ARCHS)
        sizes = (*REPRESENTATIVE, *FURTHER)[:shapes]
        if record and operators:
            raise ValueError("--record: wants every operator, so name none")
        if out is not None:
            out.open("a").close()  # better now than after the run
        run = support_page.MatrixRun(samples, sizes, archs, not forward, variants)
        rows = []
        for release in triton.split(",") if triton else [None]:
            found = run.compile(release, jobs, timeout, anew)
            rows += found
            for row in found if kernels else ():
                typer.echo(support_page.line(row))
            if record and not run.failures:
                support_page.record(found, run)
        if out is not None:
            write_text(out, json.dumps([as_json(x) for x in rows], indent=1) + "\n")
        if record and run.failures:
            typer.secho("not recorded: what could not be traced is missing", fg="red", err=True)
        if run.failures or any(x.status in ("crash", "hang") for x in rows):
            raise typer.Exit(1)
