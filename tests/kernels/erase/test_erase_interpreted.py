"""The kernels of the erased vector under Triton's interpreter, against the formula in float64."""

import torch

from slipstream.kernels.elementwise import erase as op
from tests.support.interpreted import error, interpreted


def check(shape: tuple[int, ...], has_b: bool, dtype: torch.dtype) -> None:
    g, k, b = -torch.rand(shape), torch.randn(shape).to(dtype), torch.rand(shape).to(dtype)
    g.view(-1)[:3] = torch.tensor([-torch.inf, -1e4, 0.0])
    da, found = torch.randn(shape).to(dtype), []
    for kernels in (True, False):
        given = [g, k, b if has_b else None]
        if not kernels:
            given = [None if x is None else x.double() for x in given]
        leaves = [None if x is None else x.clone().requires_grad_() for x in given]
        a = op._Erase.apply(*leaves, "triton") if kernels else op.plain(*leaves)  # pyright: ignore
        there = [x for x in leaves if x is not None]
        found.append([a, *torch.autograd.grad(a, there, da.to(a.dtype))])
    assert found[0][0].dtype == dtype
    for got, want in zip(*found, strict=True):
        assert error(got, want) < (1e-6 if dtype == torch.float32 else 4e-3), (shape, dtype)


@interpreted
def test_triton_erase_matches_formula() -> None:
    for shape, has_b in (((2, 37, 3, 33), True), ((1, 1, 1, 5), False), ((1, 9, 2, 128), False)):
        check(shape, has_b, torch.float32)
        check(shape, has_b, torch.float16)
    x = torch.randn(2, 3, 2, 4)
    assert op._forward._mismatch((x, x.half(), x.half(), "triton")) is None
    torch.library.opcheck(op._forward.overload, (x, x, x, "triton"))
    torch.library.opcheck(op._forward.backward.overload, (x, x, x, None, "triton"))
