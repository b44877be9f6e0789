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
KINDS = ("kda", "dplr")
# kind, K, V, dtype, packed, whether gates are of that dtype too
CASES = [
    *((kind, 128, 128, "bfloat16", packed, False) for kind in KINDS for packed in (False, True)),
    *((kind, 128, 128, "bfloat16", packed, True) for kind in KINDS for packed in (False, True)),
    ("kda", 64, 64, "bfloat16", False, False),
    ("dplr", 64, 128, "bfloat16", False, True),
    ("dplr", 128, 64, "float16", True, False),
    ("kda", 128, 64, "float16", False, True),
]
GATES = ("weak", "mixed", "strong", "zero", "reset", "middle")


def check(index: int) -> None:
    """The worst error of each gradient over the gates; inf where two runs differ."""
    kind, K, V, name, packed, narrow = CASES[index]
    dtype = getattr(torch, name)
    size = (1, 385, 2, 4, K, V, LENGTHS) if packed else (2, 150, 2, 2, K, V, None)
    worst = {}
    for gate in GATES:
        terms = bench.inputs(kind, size, gate, dtype, state=True, narrow=narrow)
        own = bench.own(terms)
        assert own is not None and (terms.g is None or own.takes_grads(terms, terms.v))
        for n, e in bench.compare(kind, size, dtype, gate, narrow).items():
            worst[n] = max(worst.get(n, (0.0, "")), (e if e == e else torch.inf, gate))
    found = (f"{n[:5]} {e:.1e} {gate}" for n, (e, gate) in worst.items())
    print(kind, K, V, name, "packed" * packed, "narrow" * narrow, *found, flush=True)


def times() -> None:
    for kind, gate in (("kda", "weak"), ("dplr", "rwkv7")):
        for narrow in (False, True):
            terms = bench.inputs(kind, bench.TIMED, gate, torch.bfloat16, False, narrow)
            each = bench.stages(terms, 1.0)
            line = [f"{name} {bench.bench(fn):.3f}" for name, fn in each.items()]
            print(kind, "narrow" * narrow, *line, flush=True)
            del each, terms
    for kind in ("kda", "dplr"):
        for gate in ("strong", "mixed"):
            terms = bench.inputs(kind, bench.TIMED, gate, torch.bfloat16, state=False)
            each = bench.stages(terms, 1.0)
            line = [f"{name} {bench.bench(each[name]):.3f}" for name in ("prepare", "grads")]
            print(kind, gate, *line, flush=True)
            del each, terms


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
