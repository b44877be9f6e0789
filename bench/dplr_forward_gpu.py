"""kda, dplr and rwkv7 forward on sm_90, kernel by kernel.

python bench/dplr_forward_gpu.py --check kda   # against the float64 reference; dplr, iplr
python bench/dplr_forward_gpu.py               # ms of forward, us of its kernels
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.dplr_gpu import PACKED, TIMED, WHOLE, bench, error, inputs, own
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from slipstream.kernels.linear.sm90.dplr import backend as sm90
from slipstream.kernels.linear.triton.dplr import backend as launch

NARROW = (1, 200, 2, 2, 64, 64, None)
CASES = [(WHOLE, "bfloat16"), (PACKED, "bfloat16"), (NARROW, "bfloat16"), (NARROW, "float16")]
GATES = ("weak", "zero", "middle", "strong", "mixed", "reset")


def check(kind: str) -> bool:
    """o and the final state against the float64 reference; twice the same bits."""
    fine = True
    for size, dtype in CASES:
        line = []
        for gate in GATES[:1] if kind == "iplr" else GATES:
            terms = inputs(kind, size, gate, getattr(torch, dtype), state=True)
            got, again = (launch.forward(terms, 0.1, own(terms)) for _ in range(2))
            wide = {
                n: x.double()
                for n, x in terms._asdict().items()
                if x is not None and n != "cu_seqlens"
            }
            want = linear_reference(LinearInputs(**wide, cu_seqlens=terms.cu_seqlens), 0.1)
            off = [error(x, y) for x, y in zip(got, want, strict=True)]
            same = all(torch.equal(x, y) for x, y in zip(got, again, strict=True))
            fine &= max(off) < 5e-3 and same
            line.append(f"{gate} {off[0]:.1e} {off[1]:.1e}" + ("" if same else " VARIES"))
        print(kind, size[4:], dtype, *line, flush=True)
    return fine


def kernels(fn: Callable[[], Any]) -> str:
    """us of each kernel that a call launches."""
    fn()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            fn()
        torch.cuda.synchronize()
    found = [x for x in profile.key_averages() if "dplr" in x.key]
    return " ".join(f"{x.key[5:-7]} {x.device_time * x.count / 5:.0f}" for x in found)


def times(kind: str, gate: str, options: list[tuple[str, Any]]) -> None:
    terms = inputs(kind, TIMED, gate, torch.bfloat16, state=False)
    line = [f"forward {bench(lambda: launch.forward(terms, 0.1, own(terms))):.3f}:"]
    line.append(kernels(lambda: launch.forward(terms, 0.1, own(terms))))
    for name, value in options:
        before = getattr(sm90, name)
        setattr(sm90, name, value)
        line.append(f"{name} {value}: {kernels(lambda: launch.forward(terms, 0.1, own(terms)))}")
        setattr(sm90, name, before)
    print(kind, gate, *line, flush=True)


def backward(kind: str, gate: str) -> None:
    terms = inputs(kind, TIMED, gate, torch.bfloat16, state=False)
    do = torch.randn_like(terms.v)
    found = kernels(lambda: launch.backward(terms, do, None, 0.1, own(terms)))
    print(kind, gate, "backward:", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.check:
        raise SystemExit(0 if check(options.check) else "results differ")
    times("kda", "weak", [])
    times("dplr", "rwkv7", [])
    for gate in ("strong", "middle"):
        for kind in ("kda", "dplr"):
            times(kind, gate, [])
    for kind, gate in (("kda", "weak"), ("dplr", "rwkv7")):
        backward(kind, gate)


if __name__ == "__main__":
    main()
