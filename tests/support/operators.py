"""The rows of slipstream/tools/catalog.py as the tests take them: small, with state, in float32."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.tools.catalog import OPERATORS, Sample, Shape
from tests.support.formulas import has_formula

Args = dict[str, Any]
TESTED = [x for x in OPERATORS if x.tested]
# the linear family and the scan: (output, state), an implementation "reference", no formula
LINEAR = [x for x in TESTED if x.op.startswith(("chunk_", "fused_recurrent_"))]
# what is around them, and has a formula
BLOCKS = [x for x in TESTED if has_formula(x)]
# names of arguments that get no gradient
FIXED = {name for x in TESTED for name in x.fixed.split()}

EPS = {torch.float64: 2.2e-16, torch.float32: 1.2e-7, torch.float16: 9.8e-4, torch.bfloat16: 7.8e-3}
CHUNK = 64


@dataclass(frozen=True)
class Size(Shape):
    T: int = 37
    K: int = 16
    V: int = 24
    state: bool = True
    dtype: torch.dtype = torch.float32
    HV: int | None = 4
    M: int = 8
    Z: int = 11


def packed(size: Size, *lengths: int) -> Size:
    return replace(size, B=1, T=sum(lengths), lengths=lengths)


def block_size(T: int, D: int, dtype: torch.dtype = torch.float32) -> Size:
    """T tokens of D channels, whatever an operator calls them."""
    return Size(T=T, D=D, C=D, K=D, V=D + 2, dtype=dtype)


def over_time(op: Sample, args: Mapping[str, Any], begin: int, end: int) -> Args:
    """The arguments of tokens begin .. end-1, without state and packing."""
    cut = {}
    for name, letters in op.dims.items():
        steps = 2 if "R" in letters else 1
        x = args[name]
        cut[name] = x[:, begin * steps : end * steps] if has_time(op, name) else x
    return cut


def has_time(op: Sample, name: str) -> bool:
    return bool(set("TR") & set(op.dims[name]))


def scan_inputs(B: int, T: int, D: int, N: int, G: int, sequences: int | None) -> dict[str, Tensor]:
    """Arguments of selective_scan, D channels with N states each and G groups; any numbers."""
    of_token, of_group, states = (B, T, D), (B, T, G, N), (sequences or B, D, N)
    shapes = {"u": of_token, "delta": of_token, "A": (D, N), "B": of_group, "C": of_group}
    shapes |= {"D": (D,), "z": of_token, "delta_bias": (D,), "initial_state": states}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def numbers_of_no_chunk(cu_seqlens: Tensor, C: int) -> list[int]:
    """Of those that a packed call counts, chunks of sequence n having cu[n] // C + n and on."""
    begin, end = cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()
    used = {
        a // C + n + i for n, (a, b) in enumerate(zip(begin, end)) for i in range(-(-(b - a) // C))
    }
    return sorted({*range(end[-1] // C + len(end))} - used)


def never_written(x: Tensor) -> list[int]:
    """Rows that hold NaN alone, as fresh memory does."""
    return x.isnan().flatten(1).all(1).nonzero().flatten().tolist()


def each(change: Callable[[Tensor], Tensor], x: Any) -> Any:
    """Changes each tensor of a state that is several."""
    if isinstance(x, tuple):
        return tuple(change(y) for y in x)
    return change(x) if isinstance(x, Tensor) else x


def cast(args: Mapping[str, Any], dtype: torch.dtype) -> Args:
    """The floating arguments in another dtype."""
    to = lambda x: x.to(dtype) if x.is_floating_point() else x  # noqa: E731
    return {name: each(to, x) for name, x in args.items()}


def leaves(args: Mapping[str, Any]) -> tuple[Args, list[Tensor]]:
    """The arguments with gradients asked for, and the list of those that take one."""
    found: list[Tensor] = []

    def own(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        found.append(x.detach().clone().requires_grad_())
        return found[-1]

    return {name: x if name in FIXED else each(own, x) for name, x in args.items()}, found


def with_grads(
    run: Callable[[Args], list[Tensor]], args: Mapping[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of all inputs for random gradients of the outputs."""
    given, inputs = leaves(args)
    outputs = run(given)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outputs]
    total = sum(((x.double() * w).sum() for x, w in zip(outputs, weights)), torch.zeros(()))
    return [x.detach() for x in outputs], list(torch.autograd.grad(total, inputs))


def budget(dtype: torch.dtype) -> float:
    """A limit for relative RMS errors: C products are summed in a chunk, outputs rounded once."""
    return 4 * CHUNK * EPS[dtype] if dtype in (torch.float32, torch.float64) else 0.75 * EPS[dtype]


def relative_error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of what was wanted; nan if got has a NaN."""
    want = want.double()
    error = (got.double() - want).square().mean().sqrt().item() if want.numel() else 0.0
    size = want.square().mean().sqrt().item() if want.numel() else 0.0
    if error == 0.0:
        return 0.0
    return error / size if size > 0 else math.inf


def assert_near(
    op: Sample, got: list[Tensor], want: list[Tensor], tolerance: float, what: str
) -> None:
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert x.shape == y.shape, (op.name, what, i, x.shape, y.shape)
        error = relative_error(x, y)
        assert error <= tolerance, f"{op.name} {what} {i}: {error:.2e} > {tolerance:.2e}"
