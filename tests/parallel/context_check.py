"""Operators under context parallelism beside one process: results, and bits.

    torchrun --nproc-per-node 4 tests/parallel/context_check.py [--only REGEX] [--seeds N]

On GPUs, or on a CPU. Results and gradients of random packings and shards of any length are compared
with one process's, and the bits of the deterministic mode with those of one rank; it fails where
they differ. tests/parallel/test_context_many.py runs it.
"""

import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from context_parallel import backward, first, join, parts, sample, slowest
from harness import DEVICE, Report, error, parser

from slipstream.parallel import ContextParallel, shard
from slipstream.tools.catalog import Shape

CHECKED = (
    "chunk_retention",
    "chunk_simple_gla",
    "chunk_gla",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "chunk_rwkv7",
    "chunk_dplr_delta_rule",
    "chunk_hgrn",
    "short_convolution",
    "selective_scan",
    "attention",
)
SEGMENT = 64  # tokens of the deterministic mode
# Relative root mean square; of the deterministic mode 0
LIMIT = 1e-2 if DEVICE.type == "cuda" else 1e-9


def drawn(seed: int, ranks: int, unit: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths of packed sequences, and tokens of ranks, which begin at a multiple of unit after a
    sequence's first."""
    draw = random.Random(seed)
    sequences = tuple(draw.choice((0, 1, 40, 100, 300)) for _ in range(draw.randint(2, 6)))
    places, at = [], 0
    for n in sequences:
        places += [at + i for i in range(0, n + 1, unit)]
        at += n
    cuts = sorted(draw.choices(places or [0], k=ranks - 1))
    ends = (0, *cuts, at)
    return sequences, tuple(b - a for a, b in itertools.pairwise(ends))


def check_one(name: str, seed: int) -> list[str]:
    """What differs from one process, on this rank."""
    op, ranks, wrong = sample(name), dist.get_world_size(), []
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float64
    by_segments = name != "short_convolution"
    alone = next(
        group for r in range(ranks) if (group := dist.new_group([r])) and r == dist.get_rank()
    )
    for segments in (None, SEGMENT) if by_segments else (None,):
        sequences, lengths = drawn(seed, ranks, segments or 1)
        total, width = sum(sequences), 64 if DEVICE.type == "cuda" else 16
        shape = Shape(B=1, T=total, H=ranks, K=width, V=width, lengths=sequences, dtype=dtype)
        torch.manual_seed(seed)
        args = op.inputs(shape, DEVICE)
        args.pop("cu_seqlens")
        offsets = [sum(sequences[:i]) for i in range(len(sequences) + 1)]
        torch.manual_seed(1)
        whole = parts(op, args, 0, total)
        dout = torch.randn_like(first(op, whole, cu_seqlens=torch.tensor(offsets).int().to(DEVICE)))
        if segments is None:
            cu = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
            want = backward(op, whole, dout, cu_seqlens=cu)
        else:
            plan = ContextParallel(alone, offsets, None, segments)
            want = backward(op, whole, dout, context=plan)
        plan = ContextParallel(None, offsets, lengths, segments)
        begin, end = plan.bounds(total)
        given = parts(op, args, begin, end)
        got = backward(op, given, shard(dout, plan), context=plan)
        names = ["o", *(n for n, x in given.items() if x.requires_grad)]
        for n, x, y in zip(names, got, want, strict=True):
            if n != "o" and "T" not in op.dims[n]:
                continue  # a parameter's: the sum over ranks is rounded in another order
            y = y[:, begin:end]
            off = error(x, y)
            same = torch.equal(x, y) if segments else off < LIMIT
            if not same:
                wrong.append(f"{name} {sequences} {lengths} {segments} {n}: {off:.1e}")
    return wrong


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=2)
    options = arguments.parse_args(argv)
    join()
    report, wrong = Report(options, needs_gpu=False), []
    for name in CHECKED:
        if slowest({"": 0.0 if report.wants(name) else 1.0})[""]:  # on any rank
            continue
        for seed in range(options.seeds):
            wrong += check_one(name, seed)
        if dist.get_rank() == 0:
            print(f"{name} checked on {dist.get_world_size()} ranks", flush=True)
    print("\n".join(wrong), end="\n" if wrong else "", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
