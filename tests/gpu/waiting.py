"""What may not wait for the device, and what a CUDA graph plays."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """What was loaded or compiled before may have waited; a kernel that goes astray fails here."""
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def graph_of(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The call captured, behind one on another stream that compiles what it wants, and its results
    in the graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    return graph, captured
