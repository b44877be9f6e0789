"""Operators under context parallelism beside one process: results, and bits.

    torchrun --nproc-per-node 4 tests/parallel/context_check.py [--only REGEX] [--seeds N]

On GPUs, or on a CPU, where products are rounded by their shapes (tests/support/by_shape.py).
Results and gradients of random packings and shards of any length are compared with one process's,
and the bits of the deterministic mode with those of one rank; it fails where they differ.
tests/parallel/test_context_interpreted.py runs it.
"""

import itertools
import random
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from context_parallel import backward, first, join, parts, sample, slowest, steps_of
from harness import DEVICE, Report, error, parser

from slipstream.parallel import ContextParallel, shard
from slipstream.tools.catalog import OPERATORS, Shape
from tests.support.by_shape import RoundedByShape

CHECKED = tuple(
    x.name
    for x in OPERATORS
    # beta for each column of v is refused; the catalogue's attention has more keys than queries
    if "context" in x.takes and x.tested and not x.packed and x.dims.get("beta") != "BTGV"
    if not x.op.startswith(("fused", "attention")) or x.name == "attention"
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


class Case:
    """Sequences, how they are divided, inputs and the gradient of o; the same on every rank."""

    def __init__(self, name: str, seed: int, segments: int | None) -> None:
        self.op, ranks = sample(name), dist.get_world_size()
        dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float64
        self.sequences, self.lengths = drawn(seed, ranks, segments or 1)
        total, width = sum(self.sequences), 64 if DEVICE.type == "cuda" else 16
        shape = Shape(B=1, T=total, H=ranks, K=width, V=width, lengths=self.sequences, dtype=dtype)
        torch.manual_seed(seed)
        self.args = self.op.inputs(shape, DEVICE)
        self.args.pop("cu_seqlens")
        self.offsets = [0, *itertools.accumulate(self.sequences)]
        self.segments = segments
        torch.manual_seed(1)
        self.whole = parts(self.op, self.args, 0, total)

    def on_one_rank(self) -> tuple[Tensor, list[Tensor]]:
        """The gradient of o, and what comes out."""
        cu = torch.tensor(self.offsets, dtype=torch.int32, device=DEVICE)
        dout = torch.randn_like(first(self.op, self.whole, cu_seqlens=cu))
        if self.segments is None:
            return dout, backward(self.op, self.whole, dout, cu_seqlens=cu)
        plan = ContextParallel(group_of_one(), self.offsets, None, self.segments)
        return dout, backward(self.op, self.whole, dout, context=plan)

    def exact(self, dout: Tensor) -> list[Tensor]:
        """On one rank in float64, of the same inputs."""
        wide = {n: x.double() if x.is_floating_point() else x for n, x in self.args.items()}
        given = parts(self.op, wide, 0, self.offsets[-1])
        cu = torch.tensor(self.offsets, dtype=torch.int32, device=DEVICE)
        return backward(self.op, given, dout.double(), cu_seqlens=cu, impl="eager")


@cache
def group_of_one() -> dist.ProcessGroup:
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    found = groups[dist.get_rank()]
    assert isinstance(found, dist.ProcessGroup)
    return found


def modes(name: str) -> tuple[int | None, ...]:
    rounds = ("short_convolution", "token_shift")  # the gradient at a cut
    return (None,) if name.startswith(rounds) else (None, SEGMENT)


def compile_ahead(names: Sequence[str]) -> None:
    """Kernels of one rank's calls: each rank has those of other operators compiled, which it would
    else wait for."""
    group_of_one()  # by all
    for name in names[dist.get_rank() :: dist.get_world_size()]:
        for segments in modes(name):
            Case(name, 0, segments).on_one_rank()


def check_one(name: str, seed: int) -> list[str]:
    """The differences from one process, on this rank."""
    wrong = []
    for segments in modes(name):
        case = Case(name, seed, segments)
        op = case.op
        plan = ContextParallel(None, case.offsets, case.lengths, segments)
        begin, end = plan.bounds(case.offsets[-1])
        given = parts(op, case.args, begin, end)
        with nullcontext() if DEVICE.type == "cuda" else RoundedByShape():
            dout, want = case.on_one_rank()
            got = backward(op, given, shard(dout, plan), context=plan)
        names = ["o", *(n for n, x in given.items() if x.requires_grad)]
        for n, x, y in zip(names, got, want, strict=True):
            steps = steps_of(op, n)
            if not steps:
                continue  # a parameter's: the sum over ranks is rounded in another order
            y = y[:, steps * begin : steps * end]
            off = error(x, y)
            if torch.equal(x, y) if segments else off < LIMIT:
                continue
            said = f"{name} {case.sequences} {case.lengths} {segments} {n}: {off:.1e}"
            if not segments and DEVICE.type == "cuda":
                exact = case.exact(dout)[names.index(n)][:, steps * begin : steps * end]
                of_ranks, of_one = error(x, exact), error(y, exact)
                said += f", of float64 {of_ranks:.1e} and on one GPU {of_one:.1e}"
                if of_ranks < 2 * of_one:  # what 16 bits lose of it, both ways
                    print(said, flush=True)
                    continue
            wrong.append(said)
    return wrong


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=2)
    options = arguments.parse_args(argv)
    join()
    report, wrong = Report(options, needs_gpu=False), []
    if DEVICE.type == "cuda":
        compile_ahead([x for x in CHECKED if report.wants(x)])
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
