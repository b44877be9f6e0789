"""Decay per channel on sm_90 in Gluon: right at odd sizes, then how fast beside the portable one.

python bench/channel_hopper.py --check 0  # a case, against the float64 reference
python bench/channel_hopper.py --warm     # compiles what --times takes
python bench/channel_hopper.py --times
"""

import argparse
import time
from functools import partial

import channel_gpu
import torch
from channel_gpu import BF16, GATES, arguments, bench, compare, inputs, tell
from launches import per_kernel
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.sm90.vector_decay import backend as hopper
from slipstream.kernels.linear.triton.vector_decay import backend as portable
from slipstream.kernels.linear.triton.vector_decay import launch

# form, (B, T, H, HV, K, V), lengths of packed sequences
ODD = [
    ("g", (1, 1300, 3, 3, 128, 128), None),
    ("u", (1, 485, 2, 4, 128, 128), (5, 0, 300, 1, 164, 15)),
    ("g", (2, 600, 1, 2, 128, 128), None),
]
LABELS = ("gla A", "gla A mixed", "rwkv6 A")


def check(case: int) -> bool:
    """A line for each kind of gates."""
    form, size, lengths = ODD[case]
    channel_gpu.launch = hopper
    fine = True
    for kind in GATES:
        worst = {n: (e, "") for n, e in compare(form, BF16, BF16, size, lengths, kind).items()}
        fine &= tell(f"{case} {form} {kind} {time.perf_counter():.0f}", BF16, worst)
    return fine


def warm() -> None:
    for label in LABELS:
        form, gate, _ = channel_gpu.SHAPES[label]
        terms = inputs(form, "mixed", BF16, gate, (1, 128, 2, 2, 128, 128))
        do = torch.randn_like(terms.v)
        hopper.forward(terms, 0.1)
        hopper.backward(terms, do, None, 0.1)
        print("warm", label, flush=True)


def forwards(label: str, terms: LinearInputs, do: Tensor, scale: float) -> None:
    ms = bench(partial(hopper.forward, terms, scale))
    dv = torch.empty_like(do)
    back = bench(partial(hopper.chunk_fwd, terms, do, dv, scale, None, None, reverse=True))
    print(f"{label}: o {ms:.3f}, dv {back:.3f} ms", flush=True)


def times() -> None:
    for label in LABELS:
        _, x = arguments(label)
        terms = LinearInputs(**{n: t.detach() for n, t in x.items()})
        do, scale = torch.randn_like(terms.v), terms.q.shape[-1] ** -0.5
        forwards(label, terms, do, scale)
        run = partial(hopper.backward, terms, do, None, scale)
        each = per_kernel(run, hopper, portable, launch)
        text = ", ".join(f"{n.removeprefix('vector_decay_')} {ms:.3f}" for n, ms in each.items())
        print(f"  backward {bench(run):.3f} ms: {text}", flush=True)
        if label == "gla A":
            run = partial(portable.backward, terms, do, None, scale)
            each = per_kernel(run, portable, launch)
            text = ", ".join(
                f"{n.removeprefix('vector_decay_')} {ms:.3f}" for n, ms in each.items()
            )
            print(f"  portable {bench(run):.3f} ms: {text}", flush=True)
        del x, terms, do, run
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", type=int)
    for name in ("warm", "times"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    fine = True if options.check is None else check(options.check)
    if options.warm:
        warm()
    if options.times:
        times()
    raise SystemExit(0 if fine else "results differ from the reference")


if __name__ == "__main__":
    main()
