"""Operators whose tokens are divided among several GPUs, beside one GPU.

    torchrun --nproc-per-node 2 bench/context_parallel.py                     times and memory
    torchrun --nproc-per-node 2 bench/context_parallel.py --segments 8192     with equal bits, too

bf16, 16 heads of 128 (rwkv7: 32 of 64), as many tokens on each of N GPUs as --tokens says. fwd,
both: milliseconds of a forward pass without gradients, and of a forward with backward, of the
slowest GPU. The calls are queued before they run, as in a training step; of fwd_alone and
both_alone the host waits for the device before each call; calls of more than a tenth of a second
are not queued, and have the same in both. fwd_GiB, both_GiB: the most that any GPU
holds, with inputs and gradients. messages, MB: what a GPU sends in both, by the exchanges that it
takes part in: as many bytes as it gives each of them, of attention's those that go to other GPUs.
gpus 1 is one of the GPUs, with the tokens of all and with its own alone.
"""

import os
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import DEVICE, Call, Report, in_turns, parser, rounded, synchronize
from harness import first as seconds_of
from torch import Tensor

from slipstream.parallel import ContextParallel
from slipstream.runtime import call_replay, context_parallel
from slipstream.tools.catalog import OPERATORS, Sample, Shape

TIMED = (
    "chunk_simple_gla",
    "chunk_gla-narrow",
    "chunk_gated_delta_rule",
    "chunk_kda-narrow",
    "chunk_rwkv7-narrow",
    "attention",
)
RUNS = 7
# Seconds of a call beside which the host's time is nothing, so that it need not be queued:
# attention of 256k tokens takes two on one GPU, and in_turns would keep that busy as long again for
# each run.
SLOW_SECONDS, SLOW_RUNS = 0.1, 3


def sample(name: str) -> Sample:
    return next(x for x in OPERATORS if x.name == name)


def steps_of(op: Sample, name: str) -> int:
    """Entries a token in an argument, or in o; 0 without time."""
    letters = op.dims.get(name, "T" if name == "o" else "")
    return 1 if "T" in letters else 2 if "R" in letters else 0


def parts(op: Sample, args: Mapping[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The tokens begin .. end - 1, as leaves."""
    given = {}
    for name, x in args.items():
        steps = steps_of(op, name)
        cut = x[:, steps * begin : steps * end] if steps else x
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

    def started(sent: list[tuple[int, Tensor]], *args: Any) -> context_parallel.Messages:
        found[0] += 1
        found[1] += sum(x.nbytes for _, x in sent)
        return messages(sent, *args)

    messages = context_parallel.Messages
    with (
        mock.patch.object(context_parallel, "Messages", started),
        mock.patch.object(context_parallel, "all_gather", counting(context_parallel.all_gather, 0)),
        mock.patch.object(context_parallel, "all_to_all", counting(context_parallel.all_to_all, 0)),
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
        for _ in range(2):  # the second call is recorded; later ones replay it
            call()
        found[f"{name}_GiB"], seconds = peak(call)
        if slowest({"": seconds})[""] > SLOW_SECONDS:  # all ranks go the same way
            found[name] = found[f"{name}_alone"] = alone_ms(call, min(runs, SLOW_RUNS))
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


def join() -> None:
    """The process group that torchrun says, or this process alone."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    alone: dict[str, Any] = {"init_method": "tcp://localhost:0", "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **({} if "RANK" in os.environ else alone))


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, default=65536, help="of each GPU")
    arguments.add_argument("--heads", type=int, default=16)
    arguments.add_argument("--runs", type=int, default=RUNS, help="how often a call is timed")
    arguments.add_argument("--gate", default="weak", help="weak, strong, or zero, which keeps all")
    arguments.add_argument("--segments", type=int, default=None)
    options = arguments.parse_args(argv)
    join()
    report = Report(options)
    for name in TIMED:
        late = slowest({"": 0.0 if report.wants(name) else 1.0})[""]
        if not late:  # on any rank
            time_one(name, options, report)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
