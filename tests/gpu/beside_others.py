"""A process that calls operators again and again and counts results that differ from its first.

python -m tests.gpu.beside_others SECONDS
"""

import sys
import time

import torch

from slipstream.tools.catalog import Shape, chosen

# kernels whose barriers others took the memory of, and some that always kept it
OPS = ("chunk_gated_delta_rule", "chunk_kda", "chunk_dplr_delta_rule", "chunk_gla", "attention")
SHAPE = Shape(B=2, T=4096, H=16, K=64, V=64)


def results(op: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sample = chosen([op])[-1]
    args = sample.inputs(SHAPE, torch.device("cuda"))
    leaves = [
        x.requires_grad_()
        for x in args.values()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    ]
    outs = [x for x in sample.call(args) if x.requires_grad]
    loss = torch.stack([x.float().square().mean() for x in outs]).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [x.detach() for x in (*outs, *grads) if x is not None]


def main(seconds: float) -> None:
    first = {op: results(op) for op in OPS}
    differ = torch.zeros(len(OPS), dtype=torch.int64, device="cuda")
    calls, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for i, op in enumerate(OPS):
            pairs = zip(results(op), first[op], strict=True)
            differ[i] += torch.stack([(x != y).any() for x, y in pairs]).any()
        calls += 1
    found = dict(zip(OPS, differ.tolist(), strict=True))
    print(calls, found)
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main(float(sys.argv[1]))
