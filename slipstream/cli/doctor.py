"""slipstream doctor: what is installed here, and whether every operator computes right."""

import json as encode
from typing import Annotated

import typer


def doctor(
    operators: Annotated[
        list[str] | None,
        typer.Argument(help="names such as kda or chunk_kda; without any, every operator"),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="print one JSON object instead of text")
    ] = False,
    full: Annotated[bool, typer.Option(help="check more dtypes and shapes")] = False,
    quick: Annotated[bool, typer.Option(help="check one operator for each kind of kernel")] = False,
    checks: Annotated[
        bool,
        typer.Option(
            help="compare operators with their references; --no-checks only shows what is installed"
        ),
    ] = True,
    interpreted: Annotated[
        bool, typer.Option(help="without a GPU, check the kernels in Triton's interpreter too")
    ] = True,
    thorough: Annotated[
        bool,
        typer.Option(
            help="on a GPU check every back end, not only the one that runs; in the interpreter "
            "every operator, not one for each kind of kernel"
        ),
    ] = False,
    forget: Annotated[
        bool, typer.Option(help="first drop the verdicts about compilers on this machine")
    ] = False,
) -> None:
    """Show versions and known faults, and check every operator; exit status 1 if one is wrong."""
    from slipstream.cli.errors import reported

    with reported():
        from slipstream.runtime import guarded_launch
        from slipstream.tools import doctor_checks
        from slipstream.tools.catalog import QUICK_OPERATORS, chosen
        from slipstream.tools.terminal import bar

        samples = chosen(list(QUICK_OPERATORS) if quick and not operators else operators)
        if forget:
            guarded_launch.clear_verdicts()
        about = doctor_checks.about()
        if not json:
            doctor_checks.show(about)
        found = []
        if checks:
            shown = None if json else doctor_checks.show_check
            if not json:
                doctor_checks.show_headings()
            with bar() as progress:
                found = list(doctor_checks.examine(samples, full, shown, thorough, progress))
                if interpreted and about["device"] is None:
                    each = [chosen([name])[0] for name in QUICK_OPERATORS]
                    some = samples if operators or thorough else each
                    found += doctor_checks.interpreted(some, shown, progress)
        bad = [x for x in found if not x.ok]
        if json:
            rows = [doctor_checks.as_json(x) for x in found]
            typer.echo(encode.dumps({**about, "checks": rows}, indent=1, allow_nan=False))
        elif checks:
            verdict = f"{len(bad)} of {len(found)} checks failed" if bad else "all agree"
            typer.secho(f"{len(found)} checks: {verdict}", fg="red" if bad else "green")
        if bad:
            raise typer.Exit(1)
