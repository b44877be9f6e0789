"""Peaks of memory of the linear family's operators, beyond inputs, results and gradients.

    python bench/memory_gpu.py              a line an operator
    python bench/memory_gpu.py gla gsa      these

B1 T8192, 32 heads, K = V = 128, bf16. "forward": without gradients, in percent of inputs and
outputs; "both": of a forward and its backward, in percent of inputs, outputs and all gradients.
Promised: 25 for the additive family.
"""

import sys

import torch
from record import record, table

from slipstream.cli.samples import SAMPLES, Sample, Shape, chosen

SHAPE = Shape(B=1, T=8192, H=32)
MIB = 2**20


def size(tensors: list[torch.Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


def measure(sample: Sample) -> dict[str, object]:
    args = sample.inputs(SHAPE, torch.device("cuda"))
    given = [x for x in args.values() if isinstance(x, torch.Tensor)]
    leaves = [x.requires_grad_() for x in given if x.is_floating_point()]
    found: dict[str, object] = {"operator": sample.op}
    for name in ("forward", "both"):
        for _ in range(2):  # the first compiles
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.set_grad_enabled(name == "both"):
                outs = sample.call(args)
            results = size(outs)
            if name == "both":
                do = torch.randn_like(outs[0])
                results += do.nbytes
                grads = torch.autograd.grad(outs[0], leaves, do, allow_unused=True)
                results += size([x for x in grads if x is not None])
                del grads, do
            beyond = torch.cuda.max_memory_allocated() - before - results
            del outs
        found[f"{name} MiB"] = round(beyond / MIB)
        found[f"{name} %"] = round(100 * beyond / (size(given) + results))
    return found


def main() -> None:
    named = sys.argv[1:]
    samples = [x for x in (chosen(named) if named else SAMPLES) if x.op.startswith("chunk_")]
    rows = []
    for sample in samples:
        try:
            rows.append(measure(sample))
        except Exception as e:
            print(sample.op, type(e).__name__, str(e)[:100])
            continue
        print(*rows[-1].values(), flush=True)
        torch.cuda.empty_cache()
    print(table(rows))
    print("recorded in", record("memory_gpu", rows))


if __name__ == "__main__":
    main()
