"""The decay gate's kernels under Triton's interpreter, against its formula in float64."""

import torch
from torch import Tensor

from slipstream.kernels.elementwise import decay_gate as op
from tests.support.interpreted import error, interpreted

# x [B, T, HV] or [B, T, HV, K]; whether there are A_log, dt_bias and a bound
CASES = [
    ((2, 37, 3), True, True, None),
    ((1, 5, 1), True, False, None),
    ((2, 19, 3, 20), True, True, None),
    ((1, 300, 2, 33), True, True, -4.0),
    ((1, 9, 2, 300), False, True, -5.0),
    ((2, 7, 2, 4), False, False, -0.5),
]


def gate(x: Tensor, parameters: list[Tensor | None], bound: float | None, kernels: bool) -> Tensor:
    if kernels:
        return op._Gate.apply(x, *parameters, bound, "triton")
    return op.plain(x, *parameters, bound)


def check(
    shape: tuple[int, ...], has_A: bool, has_bias: bool, bound: float | None, dtype: torch.dtype
) -> None:
    """Gates from strong to none, of a projection that holds something else beside x."""
    wide = 8 * torch.randn(*shape[:2], 2, *shape[2:])
    A = torch.randn(shape[2]) if has_A else None
    bias = torch.randn(shape[2:]).flatten() if has_bias else None
    dg = torch.randn(shape)
    found = []
    for kernels in (True, False):
        as_dtype = dtype if kernels else torch.float64
        leaves = [None if t is None else t.to(dtype).to(as_dtype) for t in (wide, A, bias)]
        leaves = [None if t is None else t.requires_grad_() for t in leaves]
        assert leaves[0] is not None
        g = gate(leaves[0][:, :, 1], leaves[1:], bound, kernels)
        there = [t for t in leaves if t is not None]
        found.append([g, *torch.autograd.grad(g, there, dg.to(g.dtype))])
    assert found[0][0].dtype == torch.float32
    limit = 3e-6 if dtype == torch.float32 else 4e-3
    for i, (got, want) in enumerate(zip(*found, strict=True)):
        assert error(got, want) < (3e-6 if i == 0 else limit), (shape, bound, dtype, i)


def check_small() -> None:
    """The decay of a gate far below 0 is exp(z), to float32's precision."""
    x = torch.tensor([-12.0, -17.0, -25.0, -60.0, 19.0, 21.0, 90.0])[None, :, None]
    g = gate(x, [torch.zeros(1), None], None, True)
    want = op.plain(x.double(), torch.zeros(1).double(), None, None)
    torch.testing.assert_close(g.double(), want, rtol=3e-6, atol=0)


@interpreted
def test_triton_decay_gate_matches_formula() -> None:
    for case in CASES:
        check(*case, torch.float32)
    check(*CASES[0], torch.float16)
    check(*CASES[3], torch.float16)
    check_small()
    x, A, bias = torch.randn(2, 3, 2, 4), torch.randn(2), torch.randn(8)
    torch.library.opcheck(op._forward.overload, (x, A, bias, None, "triton"))
    torch.library.opcheck(op._forward.backward.overload, (x, x, A, None, -2.0, "triton"))
