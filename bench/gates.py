"""Operators with a gate per channel, by the strength of their gates and by kernels, ours alone.

    python bench/gates.py
    python bench/gates.py --only 'gla sm_90'

bf16, gates too, K = V = 128, one sequence of 8192 tokens. strength: the range of the log decay of a
token, uniform, or one number for all. fwd, both: milliseconds of a forward without gradients, and
of a forward with backward.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from harness import DEVICE, Measurement, Provider, Report, parser

from slipstream.tools.catalog import OPERATORS, Shape, family

STRENGTHS = {
    "[-0.1,0]": (-0.1, 0.0), "[-5,0]": (-5.0, 0.0), "-5": (-5.0, -5.0), "[-9,0]": (-9.0, 0.0),
    "[-20,0]": (-20.0, 0.0),
}  # fmt: skip
IMPLS = {"sm_90": None, "Triton": "triton"}  # the first: whatever is chosen on Hopper
# of the catalogue, its heads, its kernels
GATED = (
    ("chunk_gla-narrow", 96, ("sm_90", "Triton")),
    ("chunk_rwkv6-narrow", 96, ("sm_90", "Triton")),
    ("chunk_gsa", 48, ("Triton",)),
)


def rows(name: str, heads: int, kernels: str, report: Report) -> Iterator[Mapping[str, object]]:
    sample = next(x for x in OPERATORS if x.name == name)
    shape = report.shape(Shape(B=1, T=8192, H=heads))
    args = sample.inputs(shape, DEVICE)
    gate = next(x for x in ("g", "w") if x in args)
    impl = IMPLS[kernels] if DEVICE.type == "cuda" else None
    fn = partial(sample.fn, **sample.options, impl=impl)
    for strength, (low, high) in STRENGTHS.items():
        gates = low + (high - low) * torch.rand_like(args[gate])
        provider = Provider(fn, {**args, gate: gates})
        times = report.times({"fwd": provider.forward, "both": provider.gradients})
        cells = {"operator": family(sample.op), "gates": str(gates.dtype)[6:], "kernels": kernels}
        cells |= {"shape": f"{shape.B} x {shape.T} x {shape.H}", "strength": strength}
        yield cells | {way: f"{ms:.4f}" for way, ms in times.items()}


def main(argv: Sequence[str] | None = None) -> None:
    report, works = Report(parser(__doc__).parse_args(argv)), list[Measurement]()
    for name, heads, each in GATED:
        for kernels in each:
            label = f"{name.removeprefix('chunk_').removesuffix('-narrow')} {kernels}"
            works.append((label, "strong_gates", partial(rows, name, heads, kernels, report)))
    report.measure(works)


if __name__ == "__main__":
    main()
