"""The kernels of the running mean under Triton's interpreter, against plain torch in float64."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.running_mean import op
from slipstream.kernels.running_mean.inputs import MeanInputs
from tests.support.interpreted import error, interpreted

NOTHING = -torch.inf


def graded(fn: Any, given: dict[str, Tensor], douts: list[Tensor]) -> list[Tensor]:
    leaves = {n: x.clone().requires_grad_() for n, x in given.items()}
    outs = fn(**leaves)
    grads = torch.autograd.grad(
        outs, [*leaves.values()], [d.to(x.dtype) for d, x in zip(douts, outs)]
    )
    return [*outs, *grads]


def compare(
    name: str, kernels: Any, plain: Any, given: dict[str, Tensor], dtype: torch.dtype
) -> None:
    douts = [torch.randn_like(x, dtype=torch.float64) for x in plain(**given)]
    got = graded(kernels, given, douts)
    want = graded(plain, {n: x.double() for n, x in given.items()}, douts)
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        limit = 2e-5 if x.dtype == torch.float32 and dtype == torch.float32 else 1e-2
        off = error(*(torch.where(t == NOTHING, -1e3, t) for t in (x.detach(), y.detach())))
        assert off < limit, (name, i, off, dtype)


def check(shape: tuple[int, int, int], cu: Tensor | None, size: float, dtype: torch.dtype) -> None:
    B, _, D = shape
    N = B if cu is None else cu.shape[0] - 1
    k, v = (size * torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)
    start = torch.randn(N, 2 * D)
    start[0, D : D + 3] = NOTHING
    start[0, :3] = 0
    w, u = -torch.rand(D), torch.randn(D)
    w[0], w[1], w[-1] = -200.0, -torch.inf, 0.0
    of = {"cu_seqlens": cu}
    compare(
        "mean",
        lambda **x: op.running_mean(MeanInputs(**x, **of), "triton"),
        lambda **x: op._plain_mean(MeanInputs(**x, **of), False)[:2],
        {"k": k, "v": v, "w": w, "u": u, "start": start},
        dtype,
    )


@interpreted
def test_triton_running_mean_matches_torch() -> None:
    packed = torch.tensor([0, 0, 9, 10, 33, 33])
    for shape, cu in (((2, 21, 19), None), ((1, 33, 16), packed), ((1, 1, 3), None)):
        for size in (1.0, 30.0):
            check(shape, cu, size, torch.float32)
        check(shape, cu, 1.0, torch.float16)
    x = torch.randn(1, 5, 3)
    start, w = torch.randn(1, 6), torch.randn(3)
    assert op._mean._mismatch((x, x, w, w, start, None, True, "triton")) is None
    torch.library.opcheck(op._mean.overload, (x, x, w, w, start, None, True, "triton"))
