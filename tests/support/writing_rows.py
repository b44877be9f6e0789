"""Rows of the catalog that write into their arguments: what autograd and torch.jit.trace see."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.tools.catalog import CPU, OPERATORS, Sample, flat
from tests.support.operators import Size

ROWS = [x for x in OPERATORS if x.written]
SIZE = Size(T=4, H=1, HV=2, K=12, V=12)


def tensors(args: dict[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in args.items() if isinstance(x, Tensor)}


def call(row: Sample, args: dict[str, Any], impl: str) -> list[Tensor]:
    """Its outputs; it writes into args themselves."""
    chosen = {"impl": impl} if "impl" in row.takes else {}
    with torch.no_grad():
        return flat(row.fn(**args, **row.options, **chosen))


def check_versions(row: Sample, impl: str, device: torch.device = CPU, calls: int = 1) -> None:
    """Those of what is written rise in every call, and no others; nothing else is changed."""
    args = row.inputs(SIZE, device)
    before = {name: x.clone() for name, x in tensors(args).items()}
    for _ in range(calls):
        versions = {name: x._version for name, x in tensors(args).items()}
        call(row, args, impl)
        risen = {name for name, x in tensors(args).items() if x._version > versions[name]}
        assert risen == {*row.written.split()}, row.name
    bits = {name: x.view(torch.uint8) for name, x in before.items()}
    changed = {n for n, x in tensors(args).items() if not torch.equal(x.view(torch.uint8), bits[n])}
    assert changed <= risen, row.name


def check_refused(row: Sample, impl: str, device: torch.device = CPU) -> None:
    """A backward that would read what was there before."""
    args = row.inputs(SIZE, device)
    for name in row.written.split():
        if not args[name].is_floating_point():
            continue
        weight = torch.ones_like(args[name], requires_grad=True)
        total = (weight * args[name]).sum()
        call(row, args, impl)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()


def check_traced(row: Sample, impl: str, device: torch.device = CPU) -> None:
    """A graph of torch.jit.trace, called with other inputs than those traced."""
    args = row.inputs(SIZE, device)
    names = [*tensors(args)]

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        named = {**args, **dict(zip(names, given))}
        outputs = call(row, named, impl)
        return *outputs, *(named[name].clone() for name in row.written.split())

    def inputs(factor: float) -> tuple[Tensor, ...]:
        wide = (torch.float32, torch.float64)
        return tuple(factor * x if x.dtype in wide else x.clone() for x in tensors(args).values())

    graph: Any = torch.jit.trace(run, inputs(1.0), check_trace=False)
    torch.testing.assert_close(graph(*inputs(0.9)), run(*inputs(0.9)), rtol=1e-5, atol=1e-6)
