"""Groups of processes on a CPU, forks of one that has imported torch and the package; threads."""

import os
import runpy
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
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


def run_all(threads: Sequence[Thread], seconds: float | None = None) -> None:
    """Until they have ended, at most `seconds` for each."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)


@contextmanager
def own_group(backend: str = "gloo") -> Iterator[None]:
    """A group of this process alone: parameters are DTensors all the same."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
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
    sys.argv = [*arguments]
    if arguments[0] != "slipstream":
        runpy.run_path(arguments[0], run_name="__main__")
        return
    from slipstream.cli import main

    main()


def start_command(
    arguments: Sequence[object],
    environments: Sequence[Mapping[str, str]] = ({},),
    program: str | Path = "slipstream",
) -> tuple[list[BaseProcess], TextIO]:
    """`slipstream arguments`, a process for each environment, and what all of them print; program:
    another one, a file of Python."""
    context = _forkserver()
    reader, writer = context.Pipe(duplex=False)
    words = [str(x) for x in (program, *arguments)]
    processes = []
    for env in environments:
        given = (words, {**os.environ, "COLUMNS": "200", **env}, writer)
        processes.append(context.Process(target=_run_command, args=given, daemon=True))
        processes[-1].start()
    writer.close()
    output = os.fdopen(os.dup(reader.fileno()))
    reader.close()
    return processes, output


def run_ranks(arguments: Sequence[object], program: str | Path = "slipstream") -> str:
    """What two ranks of a command print: as torchrun runs them, with imports done."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
    group |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [{**group, "RANK": x, "LOCAL_RANK": x} for x in "01"]
    processes, lines = start_command(arguments, ranks, program)
    with lines:
        text = lines.read()
    for process in processes:
        process.join(60)
    assert [x.exitcode for x in processes] == [0, 0], text
    return text
