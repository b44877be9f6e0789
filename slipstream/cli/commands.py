"""The subcommands of `slipstream`, each of which imports what it needs when it runs."""

import importlib.util
import inspect
import json as encode
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import not_installed


@contextmanager
def reported() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        typer.secho(not_installed(error), fg="red", err=True)
        raise typer.Exit(1) from error
    except BrokenPipeError as error:  # such as by `| head`: nothing reads on, nothing is wrong
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  flushed as the interpreter ends
        raise typer.Exit(1) from error
    except (ValueError, TypeError, OSError, NotImplementedError) as error:
        typer.secho(f"error: {' '.join(str(error).split())}", fg="red", err=True)
        raise typer.Exit(2) from error


def need_triton() -> None:
    """Raises ModuleNotFoundError where there is no Triton, which makes and compiles the kernels."""
    if importlib.util.find_spec("triton") is None:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")


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
    from slipstream.training.ranks import Interrupt

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


def explain(
    operator: Annotated[str, typer.Argument(help="a name such as chunk_kda")],
    arch: Annotated[
        str, typer.Option(help="the GPU's architecture, such as sm_90; or cpu")
    ] = "sm_90",
    dtype: Annotated[str, typer.Option(help="of the activations: bf16, fp16 or fp32")] = "bf16",
    shape: Annotated[
        str, typer.Option(help="sizes, such as B=2,T=4096,H=8,K=128,V=128; others are small")
    ] = "",
    packed: Annotated[
        bool, typer.Option(help="several sequences in one row, by cu_seqlens")
    ] = False,
    state: Annotated[bool, typer.Option(help="with an initial state")] = False,
    grouped: Annotated[bool, typer.Option(help="twice as many heads of v as of q")] = False,
    flags: Annotated[
        bool, typer.Option(help="name the compile-time options of each kernel too")
    ] = False,
) -> None:
    """Print which back end a call takes and why, its kernels, and what was rejected and why."""

    with reported():
        if arch != "cpu":
            need_triton()
        from slipstream.tools.catalog import chosen
        from slipstream.tools.explain_text import lines, parse_shape

        how = {"packed": packed, "state": state, "grouped": grouped}
        for line in lines(chosen([operator]), parse_shape(shape, dtype, how), arch, flags):
            typer.echo(line)


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


app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
for command in (train, generate, convert, doctor, explain, precompile):
    # rich breaks lines where docstrings do
    paragraphs = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or "")
    app.command(help=paragraphs)(command)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print it and exit")] = False,
) -> None:
    """Attention kernels for PyTorch, and the language models built from them."""
    if version:
        from slipstream import __version__

        typer.echo(f"slipstream {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
