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


def names(args: dict[str, Any]) -> list[str]:
    """Names of arguments with a gradient, in the order of tests.support.operators.leaves."""
    each = [
        (n if i == 0 else f"{n}[{i}]", x)
        for n, y in args.items()
        for i, x in enumerate(y if isinstance(y, tuple) else (y,))
    ]
    return [n for n, x in each if isinstance(x, Tensor) and x.is_floating_point()]


# Initial states that are an input's token before the first. The gradient of one token, or what
# is left of a sum that cancels, may have any relative error: it is measured with that input's.
_BEFORE = {
    "mamba3": {"initial_state[1]": "k", "initial_state[2]": "v", "initial_state[3]": "angles"}
}


def by_name(op: Sample, args: dict[str, Any], grads: list[Tensor]) -> dict[str, Tensor]:
    """Gradients by the name of what they are of, those of states as said above."""
    found = dict(zip(names(args), grads, strict=True))
    for family, before in _BEFORE.items():
        if family in op.name:
            for state in [x for x in before if x in found]:
                x, y = found[before[state]], found.pop(state)
                found[before[state]] = torch.cat([x.flatten(), y.flatten().to(x.dtype)])
    return found


def run(op: Sample, args: dict[str, Any], **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    args, inputs = leaves(args)
    outputs = flat(op(args, **options))
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device) for x in outputs
    ]
    total = torch.stack([(x.double() * w).sum() for x, w in zip(outputs, weights)]).sum()
    return [x.detach() for x in outputs], list(torch.autograd.grad(total, inputs))
