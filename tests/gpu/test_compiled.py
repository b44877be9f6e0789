"""torch.compile and CUDA graphs over every operator on a device, forward and backward."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.tools.catalog import Sample, flat
from tests.gpu.operator_runs import SIZES, every_operator, on_cuda
from tests.support.operators import LINEAR, Size, leaves, packed, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# what Inductor makes of the code around a kernel differs by operator family, not by operator
WITH_INDUCTOR = ("chunk_gated_delta_rule", "chunk_kda", "chunk_simple_gla")
CASES = [pytest.param(op, "aot_eager", id=op.name) for op in LINEAR] + [
    pytest.param(op, "inductor", id=f"{op.name}-inductor")
    for op in LINEAR
    if op.name in WITH_INDUCTOR
]


def gradients(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(torch.stack([x.float().sum() for x in outputs]).sum(), inputs))


def both(call: Callable[..., list[Tensor]], args: dict, inputs: list[Tensor]) -> list[Tensor]:
    outputs = call(args)
    return [*outputs, *gradients(outputs, inputs)]


@pytest.mark.parametrize(("op", "backend"), CASES)
@pytest.mark.parametrize("is_packed", [False, True], ids=["batch", "packed"])
def test_operator_on_cuda_compiles_fullgraph_without_recompiling(
    op: Sample, backend: str, is_packed: bool
) -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda args: flat(op(args)), fullgraph=True, dynamic=True, backend=backend
    )
    if is_packed:
        sizes = [packed(Size(K=64, V=32), *n) for n in ((5, 100, 65), (64, 70, 31))]
    else:
        sizes = [Size(T=T, K=32, V=64) for T in (70, 130)]
    for i, size in enumerate(sizes):
        args, inputs = leaves(on_cuda(op.inputs(replace(size, dtype=torch.bfloat16))))
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = both(compiled, args, inputs)
        want = both(lambda given: flat(op(given)), args, inputs)
        for x, y in zip(got, want, strict=True):
            if backend == "aot_eager":  # the same kernels of the same inputs
                torch.testing.assert_close(x, y, rtol=0, atol=0)
            # not element by element: what cancels shows every rounding between the kernels
            assert relative_error(x, y) <= 1e-2


@every_operator
# the graph is captured on another stream than the one that made the leaves, which is idle
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_backward_in_cuda_graph_new_lengths(op: Sample) -> None:
    args, inputs = leaves(on_cuda(op.inputs(replace(SIZES["packed"], dtype=torch.bfloat16))))

    def step() -> list[Tensor]:
        return both(lambda given: flat(op(given)), args, inputs)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ((5, 0, 100, 65), (70, 1, 64, 35)):
        args["cu_seqlens"].copy_(torch.tensor([0, *lengths]).cumsum(0))
        graph.replay()
        replayed = [x.clone() for x in captured]
        for x, y in zip(replayed, step(), strict=True):
            assert torch.equal(x, y)
