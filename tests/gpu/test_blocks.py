"""Building blocks around attention on a GPU, in calls and under torch.compile."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream import ops
from slipstream.integrations.serving import prefill
from slipstream.ops import chunk_kda
from slipstream.runtime.token_ids import WrongId, raise_pending
from slipstream.tools.catalog import Sample
from tests.gpu.waiting import graph_of, waiting_is_an_error
from tests.support.formulas import wanted
from tests.support.large_angles import check_large_angles
from tests.support.operators import BLOCKS, Args, block_size, cast, leaves
from tests.support.state_copies import SIZE, check_copies

# ---- Norms, convolution, rotary, activations and losses on a device: what the formulas give in
# float64, the same bits when a call is made again, recorded and played; without a host sync; what
# the losses take in memory. What may be read of memory that nobody has written is NaN.


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
        torch.testing.assert_close(both(block.call, args, dout), got, rtol=0, atol=0)


@every_block
def test_block_on_cuda_never_waits_for_the_device(block: Sample) -> None:
    args, dout = on_cuda(block.inputs(block_size(70, 30)), torch.bfloat16), []
    both(block.call, args, dout)  # what is loaded or compiled at first use may wait
    with waiting_is_an_error():
        for _ in range(3):
            both(block.call, args, dout)


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
    with waiting_is_an_error():
        found = [run() for _ in range(2)]
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
    with waiting_is_an_error():
        again = run()
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


# ---- Building blocks under torch.compile on a device: by their kernels and as they are chosen,
# forward and backward, beside the same calls without it.


# the kernels that a compiled graph has by itself, and those that it has if they are asked for
CHOSEN = ("rms_norm", "short_convolution", "short_convolution-packed", "token_shift-packed")
CHOSEN += ("cross_entropy-mean", "cross_entropy-none")
NAMED = ("rotary_embedding-positions", "swiglu", "glu_linear", "token_shift-state")
COMPILED = [
    pytest.param(block, impl, id=block.name)
    for block in BLOCKS
    for impl, names in ((None, CHOSEN), ("triton", NAMED))
    if block.name in names
]


def both_compiled(call: Any, args: Args) -> list[Tensor]:
    """Outputs and gradients."""
    args, inputs = leaves(args)
    outputs = call(args)
    # a loss has its gradient before anything is known of what scales it
    total = torch.stack([x.float().square().sum() if x.dim() else x for x in outputs]).sum()
    return [*(x.detach() for x in outputs), *torch.autograd.grad(total, inputs)]


@pytest.mark.parametrize(("block", "impl"), COMPILED)
def test_block_on_cuda_compiles_fullgraph_without_recompiling(
    block: Sample, impl: str | None
) -> None:
    torch.compiler.reset()
    ours = replace(block, options={**block.options, "impl": impl})
    compiled = torch.compile(ours.call, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, T in enumerate((15, 40)):
        args = on_cuda(block.inputs(block_size(T, 30)), torch.bfloat16)
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            got = both_compiled(compiled, args)
        torch.testing.assert_close(got, both_compiled(ours.call, args), rtol=0, atol=0)


def test_update_moves_the_pool_on_under_compile() -> None:
    torch.compiler.reset()
    compiled = torch.compile(ops.short_convolution_update, fullgraph=True, backend="aot_eager")
    x, w = torch.randn(3, 30, device="cuda"), torch.randn(30, 4, device="cuda")
    pools = [torch.zeros(5, 30, 4, device="cuda") + 1 for _ in range(2)]
    slots = torch.tensor([4, -1, 0], device="cuda")
    with torch.no_grad():
        for _ in range(3):
            got = compiled(x, pools[0], w, activation="silu", state_indices=slots)
            want = ops.short_convolution_update(
                x, pools[1], w, activation="silu", state_indices=slots
            )
            assert torch.equal(got, want)
    assert torch.equal(*pools)


def test_later_calls_are_played_and_give_the_same() -> None:
    """Five in a row: worked out, recorded, and then played."""
    x = torch.randn(2, 70, 3, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    cos, sin = ops.rotary_tables(torch.arange(70, device="cuda"), 64)
    w = torch.randn(192, 4, device="cuda").requires_grad_()
    cu = torch.tensor([0, 50, 140], device="cuda", dtype=torch.int32)
    calls = {
        "rotary_embedding-positions": lambda: [ops.rotary_embedding(x, cos, sin)],
        "swiglu": lambda: [ops.swiglu(x.flatten(2), x.flatten(2) + 1)],
        "relu2": lambda: [ops.squared_relu(x)],
        "shift": lambda: list(ops.token_shift(x.flatten(2), output_final_state=True)),
        "conv": lambda: [ops.short_convolution(x.flatten(2), w, activation="silu")[0]],
        "packed": lambda: [
            ops.short_convolution(x.reshape(1, 140, 192), w, w[:, 0], cu_seqlens=cu)[0]
        ],
    }
    for name, call in calls.items():
        first: list[Tensor] = []
        for _ in range(5):
            outs = call()
            leaves = [x, w] if name in ("conv", "packed") else [x]
            grads = torch.autograd.grad(sum(y.float().square().sum() for y in outs), leaves)
            made = [*outs, *grads]
            first = first or made
            torch.testing.assert_close(made, first, rtol=0, atol=0)


# ---- Copies of states by their indices on a GPU: the kernel against a loop, and in a graph.


@pytest.mark.parametrize("size", [SIZE, (4, 128, 128)])
def test_states_are_copied_by_the_kernel(size: tuple[int, int, int]) -> None:
    for _ in range(3):  # the third call of a kind is replayed
        check_copies("triton", "cuda", size)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_prefill_reads_new_slots(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 74, 2, 128, device="cuda").bfloat16() for _ in range(3))
    g, beta = -torch.rand(1, 74, 2, 128, device="cuda"), torch.rand(1, 74, 2, device="cuda")
    terms = F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, g, beta
    states = torch.randn(6, 2, 128, 128, device="cuda").to(dtype)
    cu, slots = torch.tensor([0, 3, 73, 74]).int().cuda(), torch.tensor([4, -1, 1]).cuda()

    def call() -> torch.Tensor:
        return prefill(chunk_kda, *terms, states=states, slots=slots, cu_seqlens=cu)

    graph, found = graph_of(call)
    for at in ([4, -1, 1], [0, 2, 5], [-1, -1, -1], [3, 0, -2]):
        slots.copy_(torch.tensor(at))
        before = states.clone()
        graph.replay()
        after = states.clone()
        given = torch.stack([before[s].float() if s >= 0 else 0 * before[0].float() for s in at])
        options = {"state_v_first": True, "output_final_state": True, "cu_seqlens": cu}
        want, final = chunk_kda(*terms, initial_state=given, **options)
        assert torch.equal(found, want) and final is not None
        for slot, state in zip(at, final):
            if slot >= 0:
                before[slot] = state.to(dtype)
        assert torch.equal(after, before)


# ---- The rotation's cos and sin of large angles on a CUDA device.


def test_large_angles_are_exact() -> None:
    check_large_angles("cuda")
