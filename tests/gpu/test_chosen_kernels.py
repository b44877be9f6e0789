"""Kernels that the plan chooses by itself, at the widths that those for sm_90 take: no wait for the
device, and CUDA graphs of forward and backward with new packed lengths in the same buffers."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.tools.catalog import Sample, flat
from tests.gpu.operator_runs import on_cuda
from tests.support.operators import LINEAR, Size, leaves, packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDE = Size(H=2, HV=2, K=128, V=128)
SIZES = {"whole": Size(B=1, T=300, H=2, HV=2, K=128, V=128), "packed": packed(WIDE, 5, 0, 200, 95)}
LENGTHS = ((5, 0, 200, 95), (130, 1, 64, 105))
GRADIENTS = [op for op in LINEAR if op.name.startswith("chunk_")]


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def both(op: Sample, args: dict, inputs: list[Tensor]) -> list[Tensor]:
    outputs = flat(op(args))
    total = torch.stack([x.float().sum() for x in outputs]).sum()
    return [*(x.detach() for x in outputs), *torch.autograd.grad(total, inputs)]


@pytest.mark.parametrize("op", GRADIENTS, ids=lambda op: op.name)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_chosen_kernels_never_wait_for_the_device(op: Sample, size: str) -> None:
    args, inputs = leaves(on_cuda(op.inputs(replace(SIZES[size], dtype=torch.bfloat16))))
    for _ in range(4):  # compiled, recorded, played
        want = both(op, args, inputs)
    with waiting_is_an_error():
        got = both(op, args, inputs)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("op", GRADIENTS, ids=lambda op: op.name)
# the graph is captured on another stream than the one that made the leaves, which is idle
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_chosen_kernels_in_cuda_graph_new_lengths(op: Sample) -> None:
    args, inputs = leaves(on_cuda(op.inputs(replace(SIZES["packed"], dtype=torch.bfloat16))))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        both(op, args, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both(op, args, inputs)
    for lengths in LENGTHS:
        args["cu_seqlens"].copy_(torch.tensor([0, *lengths]).cumsum(0))
        graph.replay()
        replayed = [x.clone() for x in captured]
        for x, y in zip(replayed, both(op, args, inputs), strict=True):
            assert torch.equal(x, y)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_step_in_cuda_graph_new_slots() -> None:
    N, H, D, slots = 5, 4, 128, 9
    make: Any = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(N, 1, H, D, **make) for _ in range(3))
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    gates: Any = {"g": -torch.rand(N, 1, H, device="cuda"), "beta": torch.rand(N, 1, H, **make)}
    pool = torch.randn(slots, H, D, D, device="cuda")
    index = torch.tensor([0, 3, -1, 8, 5], device="cuda", dtype=torch.int32)

    def step(pool: Tensor) -> Tensor:
        return ops.recurrent_step(q, k, v, state=pool, **gates, state_indices=index)

    spare = pool.clone()
    for _ in range(4):
        step(spare)
    with waiting_is_an_error():
        step(spare)
    captured = pool.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step(captured)
    for slots_now in ([0, 3, -1, 8, 5], [1, -1, 2, 4, 7]):
        index.copy_(torch.tensor(slots_now))
        captured.copy_(pool)
        graph.replay()
        want = pool.clone()
        assert torch.equal(o, step(want)) and torch.equal(captured, want)
