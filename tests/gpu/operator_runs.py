"""How the tests of operators on a CUDA device call them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.tools.catalog import Sample, flat
from tests.support.operators import LINEAR, Size, leaves, packed

every_operator = pytest.mark.parametrize("op", LINEAR, ids=lambda op: op.name)


SIZES = {
    "odd": Size(B=2, T=70, K=30, V=60),
    "packed": packed(Size(K=64, V=32), 5, 0, 100, 65),
    "wide": Size(B=1, T=300, H=2, HV=2, K=128, V=128),
}


def on_cuda(args: dict[str, Any]) -> dict[str, Any]:
    def move(x: Any) -> Any:
        return tuple(move(y) for y in x) if isinstance(x, tuple) else x.cuda()

    return {name: move(x) for name, x in args.items()}


def run(op: Sample, args: dict[str, Any], **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    args, inputs = leaves(args)
    outputs = flat(op(args, **options))
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device) for x in outputs
    ]
    total = torch.stack([(x.double() * w).sum() for x, w in zip(outputs, weights)]).sum()
    return [x.detach() for x in outputs], list(torch.autograd.grad(total, inputs))
