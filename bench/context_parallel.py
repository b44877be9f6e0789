"""Operators whose tokens are dealt out to several GPUs, beside one GPU.

    torchrun --nproc-per-node 2 bench/context_parallel.py                     times and memory
    torchrun --nproc-per-node 2 bench/context_parallel.py --segments 8192     with equal bits, too
    torchrun --nproc-per-node 4 bench/context_parallel.py --check             results, on a CPU too

bf16, 16 heads of 128 (rwkv7: 32 of 64), as many tokens on each of N GPUs as --tokens says. fwd,
both: milliseconds of a forward pass without gradients, and of a forward with backward, of the
slowest GPU. The calls are queued before they run, as in a training step; of fwd_alone and
both_alone the host waits for the device before each call; calls of more than a tenth of a second
are not queued, and have the same in both. fwd_GiB, both_GiB: the most that any GPU
holds, with inputs and gradients. messages, MB: what a GPU sends in both, by the collectives that it
takes part in: as many bytes as it gives each of them. gpus 1 is one of the GPUs, with the tokens of
all and with its own alone.

--check compares results and gradients of random packings and shards of any length with one
process's, and the bits of the deterministic mode with those of one rank; it fails where they
differ.
"""

import itertools
import os
import random
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import DEVICE, Call, Report, error, in_turns, parser, rounded, synchronize
from harness import first as seconds_of
from torch import Tensor

from slipstream.parallel import ContextParallel, shard
from slipstream.runtime import call_replay, context_share
from slipstream.tools.catalog import OPERATORS, Sample, Shape

TIMED = (
    "chunk_simple_gla",
    "chunk_gla-narrow",
    "chunk_gated_delta_rule",
    "chunk_kda-narrow",
    "chunk_rwkv7-narrow",
    "attention",
)
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
SEGMENT = 64  # tokens of --check's deterministic mode
# relative root mean square; of the deterministic mode 0
LIMIT = 1e-2 if DEVICE.type == "cuda" else 1e-9
RUNS = 7
# Seconds of a call beside which the host's time is nothing, so that it need not be queued:
# attention of 256k tokens takes two on one GPU, and in_turns would keep that busy as long again for
# each run.
LONG, LONG_RUNS = 0.1, 3


def sample(name: str) -> Sample:
    return next(x for x in OPERATORS if x.name == name)


def parts(op: Sample, args: Mapping[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The tokens begin .. end - 1, as leaves."""
    given = {}
    for name, x in args.items():
        cut = x[:, begin:end] if "T" in op.dims.get(name, "") else x
        given[name] = cut.detach().requires_grad_(x.is_floating_point())
    return given


def backward(op: Sample, given: Mapping[str, Any], dout: Tensor, **options: Any) -> list[Tensor]:
    o = first(op, given, **options)
    leaves = [x for x in given.values() if x.requires_grad]
    return [o, *torch.autograd.grad(o, leaves, dout)]


def first(op: Sample, given: Mapping[str, Any], **options: Any) -> Tensor:
    found = op.fn(**given, **{**op.options, **options})
    return found if isinstance(found, Tensor) else found[0]


def slowest(found: Mapping[str, float]) -> dict[str, float]:
    """The greatest of all ranks."""
    x = torch.tensor(list(found.values()), dtype=torch.float64, device=DEVICE)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return dict(zip(found, x.tolist()))


def alone_ms(call: Call, runs: int) -> float:
    """Median milliseconds, where the device has nothing to do before each call."""
    found = []
    for _ in range(runs):
        if DEVICE.type == "cpu":
            found.append(1e3 * seconds_of(call))
            continue
        synchronize()
        dist.barrier()
        synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def peak(call: Call) -> tuple[float, float]:
    """GiB, with what was there before, and seconds."""
    if DEVICE.type == "cpu":
        return 0.0, seconds_of(call)
    torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(call)
    return torch.cuda.max_memory_allocated() / 2**30, seconds


@contextmanager
def counted_messages() -> Iterator[list[int]]:
    """Messages and bytes that this rank gives collectives meanwhile."""
    found = [0, 0]

    def counting(run: Callable[..., Any], place: int) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found[0] += 1
            found[1] += args[place].nbytes
            return run(*args, **options)

        return call

    with (
        mock.patch.object(context_share, "all_gather", counting(context_share.all_gather, 0)),
        mock.patch.object(context_share, "all_to_all", counting(context_share.all_to_all, 0)),
        mock.patch.object(dist, "all_reduce", counting(dist.all_reduce, 0)),
        mock.patch.object(call_replay, "ENABLED", False),
    ):
        yield found


def messages_of(op: Sample, args: Mapping[str, Any], plan: ContextParallel) -> list[int]:
    """Messages and bytes that this rank gives collectives in a forward with backward."""
    given = parts(op, args, 0, args[next(iter(op.dims))].shape[1])
    with torch.no_grad():
        dout = torch.randn_like(first(op, given, context=plan))
    with counted_messages() as counts:
        backward(op, given, dout, context=plan)
    return counts


def measured(op: Sample, args: Mapping[str, Any], runs: int, **options: Any) -> dict[str, float]:
    """Milliseconds and GiB."""
    given = parts(op, args, 0, args[next(iter(op.dims))].shape[1])
    with torch.no_grad():
        dout = torch.randn_like(first(op, given, **options))

    def fwd() -> None:
        with torch.no_grad():
            first(op, given, **options)

    def both() -> None:
        backward(op, given, dout, **options)

    found = {}
    for name, call in (("fwd", fwd), ("both", both)):
        for _ in range(2):  # recorded in the second, and played from then on
            call()
        found[f"{name}_GiB"], seconds = peak(call)
        if slowest({"": seconds})[""] > LONG:  # all ranks go the same way
            found[name] = found[f"{name}_alone"] = alone_ms(call, min(runs, LONG_RUNS))
        else:
            found[name] = in_turns({"": call}, runs)[""]
            found[f"{name}_alone"] = alone_ms(call, runs)
    return found


def time_one(name: str, options: Namespace, report: Report) -> None:
    op, ranks, rank = sample(name), dist.get_world_size(), dist.get_rank()
    heads, width = options.heads, 128
    if "rwkv7" in name:
        heads, width = 2 * heads, 64
    shape = report.shape(Shape(B=1, H=heads, K=width, V=width, gate=options.gate))
    each = shape.T if options.small else options.tokens
    cells = {"operator": name, "heads": heads, "gate": options.gate}

    def make(tokens: int) -> dict[str, Any]:
        return op.inputs(replace(shape, T=tokens), DEVICE)

    # what one GPU takes is measured on all of them at once, so that they go on together
    for tokens in dict.fromkeys((ranks * each, each)):
        one = slowest(measured(op, make(tokens), report.runs(options.runs)))
        if rank == 0:
            report.row("context_parallel", {**cells, "gpus": 1, "tokens": tokens, **rounded(one)})
    for segments in dict.fromkeys((None, options.segments)):
        plan = ContextParallel(None, segment_tokens=segments and min(segments, each))
        args = make(each)
        found = slowest(measured(op, args, report.runs(options.runs), context=plan))
        messages, sent = messages_of(op, args, plan)
        del args
        if rank == 0:
            row = {**cells, "gpus": ranks, "tokens": ranks * each, **rounded(found)}
            row |= {"messages": messages, "MB": round(sent / 1e6, 3)}
            report.row("context_parallel", {**row, "segments": segments or ""})


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
    by_segments = name not in ("chunk_hgrn", "short_convolution", "selective_scan")
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


def join() -> None:
    """The process group that torchrun says, or this process alone."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        method = "tcp://localhost:0"
        dist.init_process_group(backend, init_method=method, rank=0, world_size=1)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, default=65536, help="of each GPU")
    arguments.add_argument("--heads", type=int, default=16)
    arguments.add_argument("--runs", type=int, default=RUNS, help="how often a call is timed")
    arguments.add_argument("--gate", default="weak", help="weak, strong, or zero, which keeps all")
    arguments.add_argument("--segments", type=int, default=None)
    arguments.add_argument("--check", action="store_true")
    arguments.add_argument("--seeds", type=int, default=2, help="of --check")
    options = arguments.parse_args(argv)
    join()
    report, wrong = Report(options, needs_gpu=not options.check), []
    for name in CHECKED if options.check else TIMED:
        late = slowest({"": 0.0 if report.wants(name) else 1.0})[""]
        if late:  # on any rank
            continue
        if options.check:
            for seed in range(options.seeds):
                wrong += check_one(name, seed)
            if dist.get_rank() == 0:
                print(f"{name} checked on {dist.get_world_size()} ranks", flush=True)
        else:
            time_one(name, options, report)
    print("\n".join(wrong), end="\n" if wrong else "", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
