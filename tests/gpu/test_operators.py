"""Every operator on a CUDA device: what the CPU gives in float64, without a host sync, in a graph.

What a kernel may read of memory that nobody has written is NaN here.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.tools.catalog import Sample, flat
from tests.gpu.operator_runs import SIZES, by_name, every_operator, fitting, on_cuda, run
from tests.support.operators import LINEAR, Size, cast, leaves, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHORT = {name: SIZES[name] for name in ("odd", "packed")}
# outputs, gradients: relative RMS error
LIMITS = {torch.float32: (1e-4, 2e-4), torch.bfloat16: (0.006, 0.02)}
IMPLS = ("triton", "eager")
# all multiprocessors at work, and loops of several turns over columns
FULL = {
    "128": Size(B=1, T=512, H=64, HV=64, K=128, V=128, M=128),
    "256": Size(B=1, T=512, H=64, HV=64, K=256, V=256, M=256),
}


def supported(op: Sample, args: dict[str, Any], impl: str) -> str | None:
    """impl, or None, whatever is chosen instead, where the plan knows a fault of it."""
    try:
        op(args, impl=impl)
    except NotImplementedError as refusal:
        if "sm_90" not in str(refusal):
            raise
        return None
    return impl


def poison() -> None:
    """Leaves NaN in what the allocator hands out next."""
    sizes = (1 << n for n in (8, 12, 16, 18, 20, 22))
    kept = [torch.full((n,), torch.nan, device="cuda") for n in sizes for _ in range(4)]
    del kept


@every_operator
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_operator_on_cuda_matches_reference(
    op: Sample, impl: str, size: str, dtype: torch.dtype
) -> None:
    args = op.inputs(replace(SIZES[size], dtype=dtype, gate="mixed"))
    want, want_grads = run(op, cast(args, torch.float64), impl="reference")
    moved = on_cuda(args)
    chosen = supported(op, moved, impl)
    poison()
    got, grads = run(op, moved, impl=chosen)
    most, most_of_gradients = LIMITS[dtype]
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        error = relative_error(x.cpu(), y)
        assert error <= most, f"{op.name} {i}: {error:.2e} > {most}"
    expected = by_name(op, args, want_grads)
    for name, x in by_name(op, args, grads).items():
        error = relative_error(x.cpu(), expected[name])
        assert error <= most_of_gradients, f"{op.name} d{name}: {error:.2e} > {most_of_gradients}"
    poison()
    again, grads_again = run(op, moved, impl=chosen)
    for i, (x, y) in enumerate(zip([*got, *grads], [*again, *grads_again])):
        assert torch.equal(x, y), f"{op.name} {i}: other bits the second time"


@every_operator
def test_float64_on_cuda_matches_reference(op: Sample) -> None:
    args = op.inputs(replace(SIZES["odd"], dtype=torch.float64, gate="mixed"))
    want, want_grads = run(op, args, impl="reference")
    poison()
    got, grads = run(op, on_cuda(args), impl="eager")
    for i, (x, y) in enumerate(zip([*got, *grads], [*want, *want_grads], strict=True)):
        assert relative_error(x.cpu(), y) <= 1e-10, f"{op.name} {i}: {relative_error(x.cpu(), y)}"


@pytest.mark.parametrize("size", FULL)
@pytest.mark.parametrize(
    "op", [x for x in LINEAR if x.name.startswith("chunk_")], ids=lambda op: op.name
)
def test_portable_kernels_same_bits_under_load(op: Sample, size: str) -> None:
    """Tiles that a loop overwrites while products read them show in other bits, now and then."""
    shape = replace(fitting(op, FULL[size]), dtype=torch.bfloat16, gate="mixed")
    args = on_cuda(op.inputs(shape))
    chosen = supported(op, args, "triton")
    first, *others = ([*out, *grads] for out, grads in (run(op, args, impl=chosen) for _ in "abc"))
    for other in others:
        for i, (x, y) in enumerate(zip(first, other, strict=True)):
            assert torch.equal(x, y), f"{op.name} {i}: other bits"


@every_operator
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("size", SHORT)
def test_operator_on_cuda_never_waits_for_the_device(op: Sample, impl: str, size: str) -> None:
    args, inputs = leaves(on_cuda(op.inputs(SIZES[size])))
    chosen = supported(op, args, impl)
    flat(op(args, impl=chosen))  # what is loaded or compiled at first use may wait
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        outputs = flat(op(args, impl=chosen))
        total = torch.stack([x.float().sum() for x in outputs]).sum()
        torch.autograd.grad(total, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()  # a kernel that went astray fails here, not in the next test


@every_operator
def test_operator_in_cuda_graph_new_lengths(op: Sample) -> None:
    size = SIZES["packed"]
    args = on_cuda(op.inputs(replace(size, dtype=torch.bfloat16)))
    flat(op(args, impl="triton"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        flat(op(args, impl="triton"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flat(op(args, impl="triton"))
    cu = args["cu_seqlens"]
    for lengths in (size.lengths, (70, 1, 64, 35)):
        assert lengths is not None
        cu.copy_(torch.tensor([0, *lengths]).cumsum(0))
        graph.replay()
        for x, y in zip(captured, flat(op(args, impl="triton"))):
            assert torch.equal(x, y)
