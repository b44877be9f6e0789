"""Every operator on a CUDA device: what the CPU gives in float64, without a host sync."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.operators import OPERATORS, Operator, Size, flat, leaves, packed, relative_error, widen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
every_operator = pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
SIZES = [Size(B=2, T=70, K=30, V=60), packed(Size(K=64, V=32), 5, 0, 100, 65)]
# outputs, gradients: relative RMS error
LIMITS = {torch.float32: (1e-4, 2e-4), torch.bfloat16: (0.006, 0.02)}


def on_cuda(args: dict[str, Any]) -> dict[str, Any]:
    def move(x: Any) -> Any:
        return tuple(move(y) for y in x) if isinstance(x, tuple) else x.cuda()

    return {name: move(x) for name, x in args.items()}


def run(op: Operator, args: dict[str, Any], **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    args, inputs = leaves(args)
    outputs = flat(op(args, **options))
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device) for x in outputs
    ]
    total = torch.stack([(x.double() * w).sum() for x, w in zip(outputs, weights)]).sum()
    return [x.detach() for x in outputs], list(torch.autograd.grad(total, inputs))


@every_operator
@pytest.mark.parametrize("size", SIZES, ids=["batch", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operator_on_cuda_matches_reference(op: Operator, size: Size, dtype: torch.dtype) -> None:
    args = op.inputs(size, dtype, gate="mixed")
    want, want_grads = run(op, widen(args), impl="reference")
    got, grads = run(op, on_cuda(args))
    for tolerance, ours, theirs in zip(LIMITS[dtype], (got, grads), (want, want_grads)):
        for i, (x, y) in enumerate(zip(ours, theirs, strict=True)):
            error = relative_error(x.cpu(), y)
            assert error <= tolerance, f"{op.name} {i}: {error:.2e} > {tolerance}"


@every_operator
@pytest.mark.parametrize("size", SIZES, ids=["batch", "packed"])
def test_operator_on_cuda_never_waits_for_the_device(op: Operator, size: Size) -> None:
    args, inputs = leaves(on_cuda(op.inputs(size)))
    flat(op(args))  # what is loaded or compiled at first use may wait
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        outputs = flat(op(args))
        total = torch.stack([x.float().sum() for x in outputs]).sum()
        torch.autograd.grad(total, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
