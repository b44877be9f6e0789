"""Small calls of operators, forward and backward, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python bench/sanitize.py chunk_gla
    compute-sanitizer --tool racecheck python bench/sanitize.py chunk_gla

Odd sizes, packed sequences and states; every tensor has memory of its own, so that an access
beyond its end is seen. The sanitizer slows kernels down a hundredfold: a few operators at a time.
"""

import os
import sys

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from slipstream.cli.samples import Shape, chosen

SHAPES = [
    Shape(B=1, T=130, H=2, K=64, V=64, state=True),
    Shape(B=2, T=70, H=2, K=60, V=64, packed=True, grouped=True, state=True),
]


def main() -> None:
    for sample in chosen(sys.argv[1:]):
        for shape in SHAPES:
            args = sample.inputs(shape, torch.device("cuda"))
            outs = sample.call(_leaves(args))
            wanted = [x for x in outs if x.requires_grad]
            if wanted:
                torch.autograd.backward(wanted, [torch.randn_like(x) for x in wanted])
            torch.cuda.synchronize()
        print(sample.op, "ran", flush=True)


def _leaves(args: dict) -> dict:
    def leaf(x: object) -> object:
        if isinstance(x, tuple):
            return tuple(leaf(y) for y in x)
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            return x.detach().requires_grad_()
        return x

    return {name: leaf(x) for name, x in args.items()}


if __name__ == "__main__":
    main()
