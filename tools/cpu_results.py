"""Hashes of what every operator computes on a CPU, to show that a change keeps results bit by bit.

    python tools/cpu_results.py write before.json
    ... change what should change no number ...
    python tools/cpu_results.py write after.json
    python tools/cpu_results.py compare before.json after.json

A row is a call of the catalogue at one shape by one implementation: its outputs, final states and
gradients. Equal hashes are equal bits. They hold for one machine and one release of torch, which
the file names: written before and after a change, not kept.
"""

import argparse
import hashlib
import json
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import own_checkout  # noqa: F401
import torch
from torch import Tensor

from slipstream.tools.catalog import OPERATORS, Sample, Shape

SMALL = Shape(B=2, T=37, H=2, K=16, V=16, Z=50, M=8, D=48, state=True, dtype=torch.float32)
SHAPES = {
    "fp32": SMALL,
    "fp64 grouped": replace(SMALL, dtype=torch.float64, grouped=True, K=8),
    "bf16 packed": replace(SMALL, dtype=torch.bfloat16, packed=True, gate="mixed"),
}
IMPLS = ("eager", "reference")


def results(sample: Sample, shape: Shape, impl: str) -> list[Tensor]:
    """Outputs, states too, then gradients of all floating arguments."""
    torch.manual_seed(0)
    args = sample.inputs(shape)
    frozen = {*sample.fixed.split(), *sample.written.split()}
    leaves = [
        x.requires_grad_()
        for name, x in args.items()
        if isinstance(x, Tensor) and x.is_floating_point() and name not in frozen
    ]
    torch.manual_seed(0)  # operators that draw
    outputs = sample.call(args, impl)
    live = [x for x in outputs if x.requires_grad]
    gradients: tuple[Tensor | None, ...] = ()
    if live and leaves:
        douts = [torch.randn(x.shape).to(x.dtype) for x in live]
        gradients = torch.autograd.grad(live, leaves, douts, allow_unused=True)
    return [*outputs, *(x for x in gradients if x is not None)]


def digest(tensors: list[Tensor]) -> str:
    found = hashlib.sha256()
    for x in tensors:
        found.update(f"{x.dtype} {tuple(x.shape)}".encode())
        found.update(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def rows(only: re.Pattern) -> Iterator[tuple[str, str]]:
    for sample in OPERATORS:
        for name, shape in SHAPES.items():
            for impl in IMPLS if "impl" in sample.takes else IMPLS[:1]:
                row = f"{sample.name} {name} {impl}"
                if only.search(row):
                    try:
                        yield row, digest(results(sample, shape, impl))
                    except Exception as error:  # what is refused has a row too
                        yield row, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


def write(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # sums in one order
    found: dict[str, Any] = {"machine": f"{platform.machine()}, torch {torch.__version__}"}
    found["rows"] = dict(rows(args.only))
    args.file.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found['rows'])} results -> {args.file}")


def compare(args: argparse.Namespace) -> None:
    before, after = (json.loads(x.read_text()) for x in (args.file, args.other))
    if before["machine"] != after["machine"]:
        sys.exit(f"of two machines: {before['machine']}; {after['machine']}")
    before, after = before["rows"], after["rows"]
    differing = [x for x in before.keys() | after.keys() if before.get(x) != after.get(x)]
    for row in sorted(differing):
        print(f"{row}: {before.get(row, 'none')} -> {after.get(row, 'none')}")
    print(f"{len(before)} before, {len(after)} after, {len(differing)} differ")
    sys.exit(1 if differing else 0)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("write", help="hash the results of this tree")
    one.add_argument("file", type=Path)
    one.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX")
    one.set_defaults(run=write)
    two = commands.add_parser("compare", help="exit status 1 if two files differ")
    two.add_argument("file", type=Path)
    two.add_argument("other", type=Path)
    two.set_defaults(run=compare)
    args = parser.parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    main()
