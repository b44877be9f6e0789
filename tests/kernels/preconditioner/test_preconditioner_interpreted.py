"""The preconditioner's kernels under Triton's interpreter, against plain torch in float64."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.elementwise import preconditioner as op
from slipstream.kernels.elementwise.inputs import PreconditionerInputs as Inputs
from tests.support.interpreted import error, interpreted


def check(B: int, T: int, K: int, cu: Tensor | None, rest: bool, dtype: torch.dtype) -> None:
    """rest: with a centre and a state."""
    N, H = B if cu is None else cu.shape[0] - 1, 2
    tensors = [torch.randn(B, T, H, K).to(dtype), -torch.rand(B, T, H), torch.rand(B, T, H)]
    tensors += [torch.randn(H), torch.rand(N, H, K)] if rest else []
    found, douts = [], None
    for kernels in (True, False):
        leaves = [(x if kernels else x.double()).clone().requires_grad_() for x in tensors]
        given: Any = [*leaves, *[None] * (5 - len(leaves))]
        inputs = Inputs._make([*given, cu, 1.5, 1e-3])
        outs = op.precondition(inputs, "triton", rest) if kernels else op.plain(inputs, rest)
        outs = outs[: 2 + rest]
        douts = [torch.randn_like(x) for x in outs] if douts is None else douts
        grads = torch.autograd.grad(outs, leaves, [d.to(x.dtype) for d, x in zip(douts, outs)])
        found.append([*outs, *grads])
    assert found[0][0].dtype == dtype
    for i, (got, want) in enumerate(zip(*found, strict=True)):
        limit = 1e-5 if dtype == torch.float32 else 4e-3
        assert error(got.detach(), want.detach()) < limit, (i, T, K, rest, dtype)


@interpreted
def test_triton_preconditioner_matches_torch() -> None:
    packed = torch.tensor([0, 0, 9, 10, 33, 33])
    for B, T, K, cu in ((2, 21, 16, None), (1, 33, 32, packed), (1, 1, 16, None), (2, 9, 30, None)):
        check(B, T, K, cu, True, torch.float32)
        check(B, T, K, cu, False, torch.float32)
        check(B, T, K, cu, True, torch.float16)
    k, g = torch.randn(1, 5, 1, 16), -torch.rand(1, 5, 1)
    options = (None, None, None, 1.5, 1e-3)
    assert op._forward._mismatch((k, g, -g, *options, True, True, "triton")) is None
    torch.library.opcheck(op._forward.overload, (k, g, -g, *options, True, True, "triton"))
    last = k * k, k, None, k, "triton"
    torch.library.opcheck(op._forward.backward.overload, (k, g, -g, *options, *last))
