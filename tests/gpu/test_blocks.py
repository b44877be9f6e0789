"""Norms, convolution, rotary, activations and losses on a device: what the formulas give in
float64, the same bits when a call is made again, recorded and played; without a host sync; what
the losses take in memory. What may be read of memory that nobody has written is NaN."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.runtime.token_ids import WrongId, raise_pending
from slipstream.tools.catalog import Sample
from tests.support.formulas import wanted
from tests.support.operators import BLOCKS, Args, block_size, cast, leaves

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
TABLE = [x for x in BLOCKS if not x.name.startswith("attention")]
# relative RMS error of outputs and gradients; a loss of 16-bit logits that are made on the way
# knows them to 1 / 256 only
LIMITS = {torch.float32: 3e-5, torch.bfloat16: 0.007, torch.float16: 0.002}
COARSE = {torch.float32: 1.0, torch.bfloat16: 8.0, torch.float16: 8.0}
# of the last dimension: widths of tiles, none of them, long rows in one piece and in several
WIDTHS = {"rms_norm": (128, 2048, 3000, 16384, 20000, 65536), "layer_norm": (2048, 3000, 65536)}
WIDTHS |= {"rms_norm-residual": (3000, 8192), "l2_norm": (64, 128), "swiglu": (1000,)}
WIDTHS |= {"rms_norm_gated": (2048, 20000), "rms_norm_gated-mamba2": (768, 12288)}
WIDTHS |= {"group_norm": (4096,), "short_convolution": (4096,), "short_convolution-packed": (512,)}
HALVES = (
    "rms_norm",
    "short_convolution",
    "swiglu",
    "rotary_embedding-positions",
    "cross_entropy-mean",
)
HALVES += ("linear_cross_entropy-mean",)
CASES = [
    (x, 100, 30, dtype)
    for x in TABLE
    for dtype in LIMITS
    if dtype != torch.float16 or x.name in HALVES
]
CASES += [(x, 40, D, torch.bfloat16) for x in TABLE for D in WIDTHS.get(x.name, ())]
CASES += [(x, 40, D, torch.float32) for x in TABLE for D in WIDTHS.get(x.name, ())[-1:]]
every_block = pytest.mark.parametrize("block", TABLE, ids=lambda x: x.name)


def on_cuda(args: Args, dtype: torch.dtype) -> Args:
    moved = cast(args, dtype)
    return {name: x.cuda() if isinstance(x, Tensor) else x for name, x in moved.items()}


def options_of(block: Sample, D: int) -> dict[str, Any]:
    """Groups of the width's quarter where the table's are of three features."""
    wide = D > 100 and "group_size" in block.options
    return {**block.options, **({"group_size": D // 4} if wide else {})}


def both(call: Callable[[Args], list[Tensor]], args: Args, dout: list[Tensor]) -> list[Tensor]:
    """Outputs and, where kernels make them, gradients; dout is made if it is empty."""
    if "state" in args:  # the convolution's step, whose kernel makes none
        with torch.no_grad():
            return call(args)
    args, inputs = leaves(args)
    outputs = call(args)
    if not dout:
        dout += [torch.randn_like(x) for x in outputs]
    incoming = [g.to(x.device, x.dtype) for g, x in zip(dout, outputs)]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, inputs, incoming)]


def error(got: Tensor, want: Tensor) -> float:
    """NaN is infinite."""
    got, want = got.double().cpu(), want.double().cpu()
    assert got.shape == want.shape
    size = float(want.square().mean().sqrt())
    off = float((got - want).square().mean().sqrt())
    e = off / size if size else off
    return e if e == e else float("inf")


@pytest.mark.parametrize(
    ("block", "T", "D", "dtype"),
    CASES,
    ids=[f"{block.name}-{D}-{str(dtype)[6:]}" for block, _, D, dtype in CASES],
)
def test_block_on_cuda_matches_reference(block: Sample, T: int, D: int, dtype: torch.dtype) -> None:
    block = replace(block, options=options_of(block, D))
    plain = block.inputs(block_size(T, D, dtype))
    args, dout = on_cuda(plain, dtype), []
    got = both(block.call, args, dout)
    want = both(partial(wanted, block), cast(plain, torch.float64), dout)
    limit = LIMITS[dtype] * (COARSE[dtype] if "linear_cross" in block.name else 1)
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert error(x, y) <= limit, i
    for _ in range(3):
        for i, (x, y) in enumerate(zip(got, both(block.call, args, dout), strict=True)):
            assert torch.equal(x, y), f"{i}: other bits"


@every_block
def test_block_on_cuda_never_waits_for_the_device(block: Sample) -> None:
    args, dout = on_cuda(block.inputs(block_size(70, 30)), torch.bfloat16), []
    both(block.call, args, dout)  # what is loaded or compiled at first use may wait
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            both(block.call, args, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def distilled(N: int, V: int, dtype: torch.dtype) -> tuple[dict[str, Any], list[Tensor]]:
    shapes = {"student": (N, 64), "student_weight": (V, 64), "student_bias": (V,)}
    shapes |= {"teacher": (N, 96), "teacher_weight": (V, 96)}
    given: dict[str, Any] = {
        name: (torch.randn(shape, device="cuda") / 2).to(dtype) for name, shape in shapes.items()
    }
    learns = [given[n].requires_grad_() for n in given if n.startswith("student")]
    return {**given, "mask": torch.rand(N, device="cuda") > 0.2, "temperature": 2.0}, learns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("N", "V"), [(77, 1000), (130, 50257)])
def test_linear_kl_div_on_cuda(dtype: torch.dtype, N: int, V: int) -> None:
    """Right, the same bits again, and without a host sync."""
    args, learns = distilled(N, V, dtype)

    def run() -> list[Tensor]:
        loss = ops.linear_kl_div(**args)
        return [loss.detach(), *torch.autograd.grad(loss, learns)]

    got = run()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        found = [run() for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for again in found:
        assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))
    wide: dict[str, Any] = {
        n: x.detach().double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for n, x in args.items()
    }
    leaves = [wide[n].requires_grad_() for n in wide if n.startswith("student")]
    loss = ops.linear_kl_div(**wide, impl="reference")
    want = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    for x, y in zip(got, want, strict=True):
        assert error(x, y) <= (3e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_cross_entropy_of_many_classes(reduction: str) -> None:
    """Several chunks; right, the same bits again, and without a host sync."""
    N, V = 3000, 151936
    h = torch.randn(N, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(V, 64, device="cuda") / 4).bfloat16().requires_grad_()
    target = torch.randint(0, V, (N,), device="cuda")
    target[::7] = -100

    def run() -> list[Tensor]:
        loss = ops.linear_cross_entropy(h, w, target, softcap=20.0, reduction=reduction)
        return [loss.detach(), *torch.autograd.grad(loss.sum(), (h, w))]

    got = run()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        again = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))
    wide = [x.detach().float().requires_grad_() for x in (h, w)]
    given: dict[str, Any] = {"softcap": 20.0, "reduction": reduction, "impl": "eager"}
    loss = ops.linear_cross_entropy(wide[0], wide[1], target, **given)
    want = [loss.detach(), *torch.autograd.grad(loss.sum(), wide)]
    for x, y in zip(got, want, strict=True):
        assert error(x, y) <= 0.03


@pytest.mark.parametrize(("N", "V"), [(16384, 32000), (8192, 151936)])
def test_linear_cross_entropy_takes_little_memory(N: int, V: int) -> None:
    """At most 0.7 GiB beyond inputs and gradients, where the logits would be 1 and 2.3."""
    torch.use_deterministic_algorithms(False)
    h = torch.randn(N, 2048, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (0.02 * torch.randn(V, 2048, device="cuda", dtype=torch.bfloat16)).requires_grad_()
    target = torch.randint(0, V, (N,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(ops.linear_cross_entropy(h, w, target), (h, w))
    made = sum(x.numel() * x.element_size() for x in grads)
    beyond = torch.cuda.max_memory_allocated() - before - made
    assert beyond <= 0.7 * 2**30, f"{beyond / 2**30:.2f} GiB"


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_wrong_target_raises_at_next_call(linear: bool, reduction: str) -> None:
    logits = torch.randn(5000, 40, device="cuda").requires_grad_()
    weight = torch.randn(60, 40, device="cuda").requires_grad_()
    V = 60 if linear else 40

    def run(target: Tensor) -> Tensor:
        given = (logits, weight, target) if linear else (logits, target)
        call = ops.linear_cross_entropy if linear else ops.cross_entropy
        return call(*given, reduction=reduction)

    good = torch.randint(0, V, (5000,), device="cuda")
    good[7] = -100
    bad = good.clone()
    bad[4711], bad[4712] = V, -1

    def next_after_bad() -> None:
        run(bad)  # whose later launches may find it already
        torch.cuda.synchronize()
        run(good)

    for _ in range(3):  # worked out, recorded, played
        run(good)
        torch.cuda.synchronize()
        with pytest.raises(WrongId, match=rf"target: id {V} at position \(4711,\)"):
            next_after_bad()
    torch.cuda.synchronize()
    raise_pending()


def test_blocks_of_no_features_or_rows() -> None:
    for shape in ((0, 64), (3, 0, 64)):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
        w = torch.ones(64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for y in (ops.rms_norm(x, w), ops.swiglu(x, x), ops.l2_norm(x)):
            assert y.shape == x.shape
        dw = torch.autograd.grad(ops.rms_norm(x, w).sum(), w)[0]
        assert not dw.any()
    logits = torch.randn(0, 9, device="cuda").requires_grad_()
    loss = ops.cross_entropy(logits, torch.empty(0, dtype=torch.int64, device="cuda"))
    assert float(loss.detach()) == 0
