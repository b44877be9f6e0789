"""The gradients of per-channel decay on sm_90 on a GPU: right, then how fast.

python bench/dplr_grads_gpu.py --check          # against the reference and the portable kernel
python bench/dplr_grads_gpu.py --check 3        # one of its cases
python bench/dplr_grads_gpu.py                  # kernels of backward, ms
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import dplr_gpu as bench

LENGTHS = (5, 0, 200, 1, 64, 115)
# kind, K, V, dtype, packed
CASES = [
    *((kind, 128, 128, "bfloat16", packed) for kind in ("kda", "dplr") for packed in (False, True)),
    ("kda", 64, 64, "bfloat16", False),
    ("dplr", 64, 128, "bfloat16", False),
    ("dplr", 128, 64, "float16", True),
    ("kda", 128, 64, "float16", False),
]
GATES = ("weak", "mixed", "strong", "zero", "reset", "middle")


def check(index: int) -> None:
    """The worst error of each gradient over the gates; inf where two runs differ."""
    kind, K, V, name, packed = CASES[index]
    dtype = getattr(torch, name)
    size = (1, 385, 2, 4, K, V, LENGTHS) if packed else (2, 150, 2, 2, K, V, None)
    worst = {}
    for gate in GATES:
        terms = bench.inputs(kind, size, gate, dtype, state=True)
        assert bench.own(terms) is not None
        for n, e in bench.compare(kind, size, dtype, gate).items():
            worst[n] = max(worst.get(n, (0.0, "")), (e if e == e else torch.inf, gate))
        found = (f"{n[:5]} {e:.1e} {gate}" for n, (e, gate) in worst.items())
        print(kind, K, V, name, "packed" * packed, gate, *found, flush=True)


def passes(kind: str, gate: str) -> str:
    """ms of forward, backward and both."""
    terms = bench.inputs(kind, bench.TIMED, gate, torch.bfloat16, state=False)
    do, own = torch.randn_like(terms.v), bench.own(terms)
    ahead = bench.bench(lambda: bench.launch.forward(terms, 1.0, own))
    back = bench.bench(lambda: bench.launch.backward(terms, do, None, 1.0, own))
    return f"forward {ahead:.3f} backward {back:.3f} both {ahead + back:.3f}"


def times() -> None:
    for kind, gate in (("kda", "weak"), ("dplr", "rwkv7")):
        terms = bench.inputs(kind, bench.TIMED, gate, torch.bfloat16, state=False)
        each = bench.stages(terms, 1.0)
        print(kind, *(f"{name} {bench.bench(fn):.3f}" for name, fn in each.items()), flush=True)
        del each, terms
        print(kind, passes(kind, gate), flush=True)
    for kind, gate in (("kda", "strong"), ("kda", "mixed"), ("dplr", "strong")):
        terms = bench.inputs(kind, bench.TIMED, gate, torch.bfloat16, state=False)
        print(kind, gate, f"grads {bench.bench(bench.stages(terms, 1.0)['grads']):.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", type=int, nargs="?", const=-1)
    args = parser.parse_args()
    if args.check is None:
        times()
    elif args.check >= 0:
        check(args.check)
    else:
        run = [sys.executable, __file__, "--check"]
        started = [subprocess.Popen([*run, str(i)]) for i in range(len(CASES))]
        for process in started:
            process.wait(timeout=600)


if __name__ == "__main__":
    main()
