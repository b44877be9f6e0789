"""Groups of processes on a CPU: forks of one that has imported torch and the package."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import start_processes

# what most of a process's time went to, each import once for all groups of a test process
PRELOADED = ["torch.distributed.fsdp", "slipstream.models", "tests.support.operators"]


def _forkserver() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _in_process(rank: int, file: str, ranks: int, what: Callable[..., None], args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    try:
        what(rank, *args)
        # else threads of gloo may free tensors while the interpreter ends: an abort
        dist.barrier()
    finally:
        dist.destroy_process_group()


def in_processes(ranks: int, folder: Path, what: Callable[..., None], *args: Any) -> list[Any]:
    """The objects that `what(rank, *args, queue)` puts into the queue in a group of processes."""
    queue = _forkserver().SimpleQueue()
    given = (str(folder / "meeting"), ranks, what, (*args, queue))
    start_processes(_in_process, given, nprocs=ranks, start_method="forkserver")
    found = []
    while not queue.empty():
        found.append(queue.get())
    return found


def _run_command(arguments: Sequence[str], env: Mapping[str, str], output: Connection) -> None:
    os.environ.clear()
    os.environ.update(env)
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    torch.set_num_threads(1)
    from slipstream.cli import main

    sys.argv = ["slipstream", *arguments]
    main()


def start_command(
    arguments: Sequence[object], environments: Sequence[Mapping[str, str]] = ({},)
) -> tuple[list[BaseProcess], TextIO]:
    """`slipstream arguments`, a process for each environment, and what all of them print."""
    context = _forkserver()
    reader, writer = context.Pipe(duplex=False)
    words = [str(x) for x in arguments]
    processes = []
    for env in environments:
        given = (words, {**os.environ, "COLUMNS": "200", **env}, writer)
        processes.append(context.Process(target=_run_command, args=given, daemon=True))
        processes[-1].start()
    writer.close()
    output = os.fdopen(os.dup(reader.fileno()))
    reader.close()
    return processes, output
