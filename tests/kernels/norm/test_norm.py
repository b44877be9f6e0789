"""The Triton norms under Triton's interpreter: small tiles, options; and what Triton 3.3.1 refuses.
With it all of them compile, by tools/matrix.py rms_norm rms_norm_gated layer_norm group_norm
l2_norm --triton 3.3.1"""

import ast
import itertools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.norm.inputs import NormInputs
from slipstream.kernels.norm.op import run as norm
from slipstream.kernels.primitives.norm_options import RECOMPUTED, NormOptions
from slipstream.nn import RMSNorm
from tests.support.interpreted import error, interpreted


@interpreted
def test_triton_norms_match_reference_past_their_last_column() -> None:
    small_tiles(1)
    check_uneven()


def inputs(shape: tuple[int, ...], dtype: torch.dtype, other: torch.dtype) -> dict[str, Tensor]:
    D = shape[-1]
    return {
        "x": torch.randn(shape).to(dtype) + 3,
        "weight": torch.randn(D).to(other),
        "bias": torch.randn(D).to(other),
        "gate": torch.randn(shape).to(other),
        "residual": torch.randn(shape).to(other),
    }


def outputs(given: dict[str, Tensor | None], n: NormOptions, impl: str) -> tuple[list[Tensor], ...]:
    leaves = {k: None if x is None else x.detach().requires_grad_() for k, x in given.items()}
    y, h = norm(NormInputs(**leaves), n, impl)  # type: ignore[arg-type]
    kept = [y, h] if n.keep_h else [y]
    generator = torch.Generator().manual_seed(1)
    dout = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in kept]
    grads = torch.autograd.grad(kept, [x for x in leaves.values() if x is not None], dout)
    return [x.detach() for x in kept], list(grads)


def check(
    n: NormOptions, names: tuple[str, ...], dtype: torch.dtype, other: torch.dtype, D: int = 24
) -> None:
    given: dict[str, Tensor | None] = {
        name: x if name in names or name == "x" else None
        for name, x in inputs((2, 3, D), dtype, other).items()
    }
    wide = {name: None if x is None else x.double() for name, x in given.items()}
    ours, theirs = outputs(given, n, "triton"), outputs(wide, n, "reference")
    plain = outputs(given, n, "eager")
    coarse = torch.float16 in (dtype, other)
    for got, want, like in zip(ours, theirs, plain):
        for x, y, z in zip(got, want, like, strict=True):
            assert x.dtype == z.dtype
            e = error(x, y)
            assert e < (8e-3 if coarse else 3e-5), (e, n, names, dtype, other)


def small_tiles(rows: int) -> None:
    """Tiles have so many rows."""
    from slipstream.kernels.norm import triton_launch as launch
    from slipstream.kernels.norm import triton_launch as tiles

    short = tiles.Row(8, 8 * rows, 4, 1, 1)
    tiles.FORWARD = (short, tiles.Row(32, 32 * rows, 4, 0, 1, lean=True))
    tiles.BACKWARD, tiles.LOOPED, tiles.SPLIT = (short,), short, short
    tiles.UNEVEN = tiles.SUMS = short
    launch._tile.cache_clear()


def check_uneven() -> None:
    """Rows of more than a round, whose last one is not full: rows that begin at multiples of 16
    bytes and others."""
    single, affine = torch.float32, ("weight", "bias")
    for D, centre in itertools.product((20, 13), (False, True)):
        n = NormOptions(1e-5, centre=centre)
        check(n, affine, single, single, D)
        check(n, ("bias",), single, single, D)
        for first in (False, True):
            gated = n._replace(activation="silu", gate_first=first)
            check(gated, ("gate", "residual", *affine), single, single, D)
        check(n._replace(keep_h=True), ("residual", "weight"), single, single, D)
        check(n._replace(groups=3), affine, single, single, 3 * D)
    check(NormOptions(1e-6, l2=True), (), single, single, 20)


@interpreted
@pytest.mark.slow
def test_triton_norms_match_reference_in_small_tiles() -> None:
    single, half = torch.float32, torch.float16
    affine = ("weight", "bias")
    for rows in (0, 1, 2):
        if rows:
            small_tiles(rows)
        for centre, groups in itertools.product((False, True), (0, 1, 6)):
            check(NormOptions(1e-5, centre=centre, groups=groups), affine, single, single)
            for first, f in ((True, "silu"), (False, "sigmoid")):
                n = NormOptions(1e-5, centre, groups=groups, activation=f, gate_first=first)
                check(n, ("gate", *affine), single, half)
            n = NormOptions(1e-5, centre, groups=groups, zero_centered=True, keep_h=True)
            check(n, ("residual", *affine), single, half)
            check(n._replace(wide_h=True), ("residual", "weight"), half, half)
            check(n._replace(wide_h=True), ("bias",), half, single)
            check(n._replace(keep_h=False), ("residual",), half, single)
        check(NormOptions(1e-6, l2=True), (), single, single)
        # wider rows keep what backward wants
        check(NormOptions(1e-6, l2=True), (), single, single, RECOMPUTED + 8)
        check_lean()
    check_strides()
    check_operators()


def check_lean() -> None:
    """Rows of 16 bits that may stay as they were loaded, and a row of zeros."""
    half, n = torch.float16, NormOptions(1e-5)
    check(n, ("weight", "bias"), half, torch.float32)
    check(n._replace(groups=3, zero_centered=True), ("weight",), half, half)
    check(n._replace(activation="sigmoid"), ("gate", "weight"), half, half)
    check(n._replace(l2=True), (), half, half)
    y, _ = norm(NormInputs(torch.zeros(3, 24, dtype=half)), n, "triton")
    assert (y == 0).all()


def check_strides() -> None:
    x, dy = torch.randn(4, 3, 10)[..., 1:9].mT, torch.randn(1, 8, 1).expand(4, 8, 3)
    grads = []
    for impl in ("triton", "eager"):
        leaf = x.detach().requires_grad_()
        y, _ = norm(NormInputs(leaf), NormOptions(1e-5), impl)
        grads += [y, *torch.autograd.grad(y, leaf, dy)]
    assert error(grads[0], grads[2]) < 1e-5
    assert error(grads[1], grads[3]) < 1e-5


def check_operators() -> None:
    """opcheck, and torch.compile of the operators around the same kernels."""
    from slipstream.kernels.norm import op

    x, w = torch.randn(5, 8), torch.randn(8)
    n = NormOptions(1e-5, centre=True, keep_h=True)
    torch.library.opcheck(op._forward.overload, (x, w, None, x, x, *n, True, "triton"))
    torch.library.opcheck(op._forward.overload, (x, None, None, None, None, *n, False, "triton"))
    y, h, stats = op._forward.overload(x, w, w, x, x, *n, True, "triton")
    args = (y, h, h, w, w, x, stats, torch.float32, *n, True, True, "triton")
    torch.library.opcheck(op._backward.overload, args)
    leaves = [torch.randn(5, 8, requires_grad=True) for _ in range(2)]

    def call(x: Tensor, residual: Tensor) -> Tensor:
        y, h = norm(NormInputs(x, w, residual=residual), n, "triton")
        return (y * h).sum()

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*leaves), leaves)
    for x, y in zip(got, torch.autograd.grad(call(*leaves), leaves), strict=True):
        assert error(x, y) < 1e-5


PLAIN = NormOptions(1e-5)
OTHER: dict[str, Any] = {x: not getattr(PLAIN, x) for x in PLAIN._fields} | {
    "eps": 1e-3,
    "groups": 2,
    "activation": "sigmoid",
}


@pytest.mark.parametrize("name", PLAIN._fields)
def test_row_norms_are_those_whose_options_are_told(name: str) -> None:
    """An option that such kernels do not get, also one yet to come, is no row norm's."""
    other = PLAIN._replace(**{name: OTHER[name]})
    told = name == "eps" or other.row_constants() != PLAIN.row_constants()
    assert other.is_row_norm == told


def test_modules_with_other_options_have_no_row_norm() -> None:
    norm = RMSNorm(4, 1e-5, zero_centered=True)
    assert norm.row_norm == NormOptions(1e-5, zero_centered=True)
    norm.options["centre"] = True
    assert norm.row_norm is None and RMSNorm(4).row_norm is None


def refused(source: str) -> list[str]:
    """`a = b = x`, and variables that are None first, and a tensor later, in a loop."""
    found = []
    for loop in (x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.For)):
        for step in (x for x in ast.walk(loop) if isinstance(x, ast.Assign)):
            values = step.value.elts if isinstance(step.value, ast.Tuple) else [step.value]
            none = any(isinstance(x, ast.Constant) and x.value is None for x in values)
            if none or len(step.targets) > 1:
                found.append(ast.unparse(step))
    return found


def test_norm_kernels_have_nothing_that_triton_33_refuses() -> None:
    spec = find_spec("slipstream.kernels.norm.triton_kernels")
    assert spec is not None and spec.origin is not None
    assert refused(Path(spec.origin).read_text()) == []


def test_refused_patterns_are_found() -> None:
    for step in ("b = None", "b, c = (None, load(x))", "b = c = load(x)"):
        assert refused(f"for i in range(3):\n    {step}") == [step]
    assert refused("b = None\nfor i in range(3):\n    b, c = load(x), load(y)") == []
