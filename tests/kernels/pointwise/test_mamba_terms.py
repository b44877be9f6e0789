"""Mamba-2's terms before its scan by Triton's kernel, under the interpreter, and in plain torch."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels.elementwise import mamba_terms as op
from tests.support.interpreted import error, interpreted

LIMITS = {torch.float32: (1e-5, 3e-5), torch.bfloat16: (8e-3, 1.6e-2)}
SHAPES = ((2, 37, 3, 64), (1, 9, 2, 5), (1, 3, 9, 64), (1, 2, 1, 700))


def inputs(B: int, T: int, H: int, P: int, dtype: torch.dtype) -> list[Tensor]:
    """u and dt are parts of rows, as a projection's are."""
    rows = torch.randn(B, T, H * P + H + 3).to(dtype)
    u, dt, _ = rows.split([H * P, H, 3], -1)
    D = torch.randn(H, 1).to(dtype).expand(H, P)
    return [u.unflatten(-1, (H, P)), dt, torch.randn(H), torch.randn(H).to(dtype), D]


def by_definition(limit: tuple[float, float] | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    u, dt, A_log, dt_bias, D = (x.double() for x in tensors)
    step = torch.log1p(torch.exp(dt + dt_bias))
    if limit is not None:
        step = torch.minimum(torch.maximum(step, torch.tensor(limit[0])), torch.tensor(limit[1]))
    return u * step[..., None], D * u, -torch.exp(A_log) * step


@interpreted
@pytest.mark.parametrize("limit", [None, (0.3, 1.2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mamba_terms_match_the_formula(dtype: str, limit: list[float] | None) -> None:
    kind = getattr(torch, dtype)
    bounds = None if limit is None else (limit[0], limit[1])
    for shape in SHAPES:
        given = inputs(*shape, kind)
        leaves = [x.detach().requires_grad_() for x in given]
        outs = op.mamba_terms(*leaves, bounds, impl="triton")
        assert [x.dtype for x in outs] == [kind, kind, torch.float32]
        wide = [x.detach().double().requires_grad_() for x in given]
        wanted = by_definition(bounds, *wide)
        douts = [torch.randn_like(x) for x in outs]
        grads = torch.autograd.grad(outs, leaves, douts)
        want = torch.autograd.grad(wanted, wide, [x.double() for x in douts])
        for limits, found, right in zip(LIMITS[kind], (outs, grads), (wanted, want), strict=True):
            for i, (x, y) in enumerate(zip(found, right, strict=True)):
                assert (e := error(x, y)) <= limits, (shape, i, e)


@interpreted
def test_mamba_terms_without_skip_are_the_same() -> None:
    """As the backward makes them again; and a skip that nothing reads has no gradient."""
    given = inputs(1, 9, 2, 5, torch.float32)
    v, skip, g = op.mamba_terms(*given[:4], None, impl="triton")
    assert skip.numel() == 0
    call = (*given[:4], None, 0.0, 9.0, "triton")
    assert op._forward._mismatch(call) is None  # what a new machine asks first
    leaves = [x.detach().requires_grad_() for x in given]
    whole, _, decay = op.mamba_terms(*leaves, impl="triton")
    assert torch.equal(v, whole) and torch.equal(g, decay)
    *_, dD = torch.autograd.grad(whole.sum(), leaves)
    assert not dD.any()


def test_plain_mamba_terms_match_the_formula() -> None:
    given = [x.double() for x in inputs(2, 7, 3, 4, torch.float32)]
    for limit in (None, (0.3, 1.2)):
        found = op.mamba_terms(*given, limit)
        torch.testing.assert_close(found, by_definition(limit, *given))
