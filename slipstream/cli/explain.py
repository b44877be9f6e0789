"""slipstream explain OP: which implementation a call takes, and why."""

from typing import Annotated

import typer


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
    from slipstream.cli.errors import need_triton, reported

    with reported():
        if arch != "cpu":
            need_triton()
        from slipstream.tools.catalog import chosen
        from slipstream.tools.explain_text import lines, parse_shape

        how = {"packed": packed, "state": state, "grouped": grouped}
        for line in lines(chosen([operator]), parse_shape(shape, dtype, how), arch, flags):
            typer.echo(line)
