"""Small calls of operators, forward and backward, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python bench/sanitize.py chunk_gla
    compute-sanitizer --tool racecheck --num-cuda-barriers 64 python bench/sanitize.py chunk_gla
    ... --impl triton                           # the portable kernels
    ... --parts 0                               # the delta rule back in one walk; N: in segments
    python bench/sanitize.py chunk_gla          # the same alone: compiles what the other launches

Odd sizes, packed sequences and states, strong gates; every tensor has memory of its own, so that an
access beyond its end is seen. Heads of 128 take the kernels for sm_90. The sanitizer slows kernels
down a hundredfold: a few operators at a time. What has been launched is printed at the end.

racecheck has to be told of barriers in shared memory (`--num-cuda-barriers 64`), and then follows
them, but has an arrival speak for the thread that arrives alone. Triton has one thread arrive for a
part of a program whose threads have met before, so of kernels whose warps have parts (sm_90) it
still reports what one part stores and another loads; and what Triton itself hands to the parts. It
tells of kernels of one part, which have no hazards (`--kernel-name kns=delta_solve` watches one),
and of the portable ones. What parts do is checked without a GPU:
tests/gluon_emulator/race_detector.py.

Calls this small would not go back in one walk: --parts has them, in parts of 2 chunks, and with N
above 0 in segments of N parts.
"""

import argparse
import os
from collections import Counter
from typing import Any

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from slipstream.tools.catalog import Sample, Shape, chosen

SIZES = {
    "whole": Shape(B=1, T=130, H=2, state=True),
    "packed": Shape(B=2, T=70, H=2, packed=True, grouped=True, state=True),
    "long": Shape(B=1, T=2300, H=1),
    "narrow": Shape(B=1, T=130, H=2, K=64, V=64, state=True),
    "odd": Shape(B=2, T=70, H=2, K=60, V=64, packed=True, grouped=True, state=True),
}
GATES = ("g", "gk", "gv", "w")
STRONG = 500.0  # times as strong


def watch(launched: Counter[str]) -> None:
    from triton import knobs

    hook: Any = knobs.runtime.launch_enter_hook
    hook.add(lambda metadata: launched.update([metadata.get()["name"]]))


def run(sample: Sample, shape: Shape, strong: bool, impl: str | None) -> None:
    args = sample.inputs(shape, torch.device("cuda"))
    if strong:
        for name in [x for x in GATES if x in args]:
            args[name] = args[name] * torch.where(torch.rand_like(args[name]) < 0.2, STRONG, 1.0)
    outs = sample.call(_leaves(args), impl)
    wanted = [x for x in outs if x.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.randn_like(x) for x in wanted])
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="+")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--impl")
    parser.add_argument("--parts", type=int)
    args = parser.parse_args()
    if args.parts is not None:
        from slipstream.kernels.linear.sm90.delta import backend
        from slipstream.kernels.linear.sm90.delta.bwd_schedule import make_schedule

        backend.choose_schedule = lambda terms: make_schedule(terms, 2, args.parts)
    launched: Counter[str] = Counter()
    watch(launched)
    for sample in chosen(args.operators):
        gated = any(f"{gate}=" in sample.tensors for gate in GATES)
        for name in args.sizes:
            for strong in (False, True) if gated else (False,):
                run(sample, SIZES[name], strong, args.impl)
        print(sample.op, "ran", flush=True)
    print("launched", ", ".join(sorted(launched)))


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
