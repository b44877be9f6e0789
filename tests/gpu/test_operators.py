"""Operators of the linear family on a GPU: results, errors, bits of the past, graphs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.tools.catalog import OPERATORS, Sample, flat
from tests.gpu.waiting import graph_of, waiting_is_an_error
from tests.support.causality import CUTS, bits, changed_bits
from tests.support.operators import LINEAR, TESTED, Size, cast, leaves, packed, relative_error

every_operator = pytest.mark.parametrize("op", LINEAR, ids=lambda op: op.name)

SIZES = {
    "odd": Size(B=2, T=70, K=30, V=60),
    "packed": packed(Size(K=64, V=32), 5, 0, 100, 65),
    "wide": Size(B=1, T=300, H=2, HV=2, K=128, V=128),
}


def on_cuda(args: dict[str, Any]) -> dict[str, Any]:
    def move(x: Any) -> Any:
        return tuple(move(y) for y in x) if isinstance(x, tuple) else x.cuda()

    return {name: move(x) for name, x in args.items()}


def names(args: dict[str, Any]) -> list[str]:
    """Names of arguments with a gradient, in the order of tests.support.operators.leaves."""
    each = [
        (n if i == 0 else f"{n}[{i}]", x)
        for n, y in args.items()
        for i, x in enumerate(y if isinstance(y, tuple) else (y,))
    ]
    return [n for n, x in each if isinstance(x, Tensor) and x.is_floating_point()]


# Initial states that are an input's token before the first. The gradient of one token, or what
# is left of a sum that cancels, may have any relative error: it is measured with that input's.
_BEFORE = {
    "mamba3": {"initial_state[1]": "k", "initial_state[2]": "v", "initial_state[3]": "angles"}
}


def by_name(op: Sample, args: dict[str, Any], grads: list[Tensor]) -> dict[str, Tensor]:
    """Gradients by the name of what they are of, those of states as said above."""
    found = dict(zip(names(args), grads, strict=True))
    for family, before in _BEFORE.items():
        if family in op.name:
            for state in [x for x in before if x in found]:
                x, y = found[before[state]], found.pop(state)
                found[before[state]] = torch.cat([x.flatten(), y.flatten().to(x.dtype)])
    return found


def run(op: Sample, args: dict[str, Any], **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    args, inputs = leaves(args)
    outputs = flat(op(args, **options))
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device) for x in outputs
    ]
    total = torch.stack([(x.double() * w).sum() for x, w in zip(outputs, weights)]).sum()
    return [x.detach() for x in outputs], list(torch.autograd.grad(total, inputs))


# ---- Every operator on a CUDA device: what the CPU gives in float64, without a host sync, in a
# graph. What a kernel may read of memory that nobody has written is NaN here.


# outputs, gradients: relative RMS error
LIMITS = {torch.float32: (1e-4, 2e-4), torch.bfloat16: (0.006, 0.02)}
IMPLS = ("triton", "eager")
CHUNKED = [op for op in LINEAR if op.name.startswith("chunk_")]
every_chunked = pytest.mark.parametrize("op", CHUNKED, ids=lambda op: op.name)
SEQUENCES = 70_000
# all multiprocessors at work, and loops of several turns over columns
FULL = {
    "128": Size(B=1, T=512, H=64, HV=64, K=128, V=128, M=128),
    "256": Size(B=1, T=512, H=64, HV=64, K=256, V=256, M=256),
}


def supported(op: Sample, args: dict[str, Any], impl: str | None) -> str | None:
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
    torch.testing.assert_close([*again, *grads_again], [*got, *grads], rtol=0, atol=0)


def halves(x: Tensor, sequences: int) -> tuple[Tensor, ...]:
    return x.split(sequences // 2, x.shape.index(sequences))


@pytest.mark.parametrize("impl", [None, "triton"])
@pytest.mark.parametrize("name", ["retention", "gated_delta_rule", "gla", "kda", "rwkv7", "gsa"])
def test_more_sequences_than_a_grid_axis(name: str, impl: str | None) -> None:
    """Of one token each, more than the 65535 programs of any axis but the first: the second half
    has what the first one has."""
    width, dtype = (64, torch.bfloat16) if impl is None else (16, torch.float32)
    size = Size(H=1, HV=1, K=width, V=width, M=width, dtype=dtype)
    op = next(x for x in LINEAR if x.op == f"chunk_{name}")
    args, inputs = leaves(on_cuda(op.inputs(packed(size, *[1] * SEQUENCES))))
    with torch.no_grad():
        for x in inputs:
            first, second = halves(x, SEQUENCES)
            second.copy_(first)
    outputs = flat(op(args, impl=impl))
    grads = torch.autograd.grad([x.float().square().sum() for x in outputs], inputs)
    for x in (*outputs, *grads):
        first, second = halves(x.detach(), SEQUENCES)
        assert first.any() and torch.equal(first, second)


@every_operator
def test_float64_on_cuda_matches_reference(op: Sample) -> None:
    args = op.inputs(replace(SIZES["odd"], dtype=torch.float64, gate="mixed"))
    want, want_grads = run(op, args, impl="reference")
    poison()
    got, grads = run(op, on_cuda(args), impl="eager")
    for i, (x, y) in enumerate(zip([*got, *grads], [*want, *want_grads], strict=True)):
        assert relative_error(x.cpu(), y) <= 1e-10, f"{op.name} {i}: {relative_error(x.cpu(), y)}"


@pytest.mark.parametrize("size", FULL)
@every_chunked
def test_portable_kernels_same_bits_under_load(op: Sample, size: str) -> None:
    """Tiles that a loop overwrites while products read them show in other bits, now and then."""
    shape = replace(FULL[size], dtype=torch.bfloat16, gate="mixed")
    args = on_cuda(op.inputs(shape))
    chosen = supported(op, args, "triton")
    first, *others = ([*out, *grads] for out, grads in (run(op, args, impl=chosen) for _ in "abc"))
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


# ---- No wait for the device, and CUDA graphs of forward and backward with new packed lengths in
# the same buffers; also by the kernels for sm_90, where the plan chooses them by itself.


WIDE = Size(H=2, HV=2, K=128, V=128, dtype=torch.bfloat16)
CHOSEN_SIZES = {"whole": replace(WIDE, B=1, T=300), "packed": packed(WIDE, 5, 0, 200, 95)}
WAITS = [(impl, SIZES[x]) for impl in IMPLS for x in ("odd", "packed")]
WAITS += [(None, x) for x in CHOSEN_SIZES.values()]


def both(call: Callable[..., Any], args: dict, inputs: list[Tensor], **given: Any) -> list[Tensor]:
    """Outputs and gradients, of an operator or of another call of it."""
    outputs = flat(call(args, **given))
    total = torch.stack([x.float().sum() for x in outputs]).sum()
    return [*(x.detach() for x in outputs), *torch.autograd.grad(total, inputs)]


@every_operator
@pytest.mark.parametrize(("impl", "size"), WAITS, ids=lambda x: x if isinstance(x, str) else "")
def test_operator_on_cuda_never_waits_for_the_device(
    op: Sample, impl: str | None, size: Size
) -> None:
    args, inputs = leaves(on_cuda(op.inputs(size)))
    chosen = supported(op, args, impl)
    for _ in range(4):  # compiled, recorded, played
        want = both(op, args, inputs, impl=chosen)
    with waiting_is_an_error():
        got = both(op, args, inputs, impl=chosen)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@every_operator
@pytest.mark.parametrize("size", [SIZES["packed"], CHOSEN_SIZES["packed"]], ids=["64", "128"])
# the graph is captured on another stream than the one that made the leaves, which is idle
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_backward_in_cuda_graph_new_lengths(op: Sample, size: Size) -> None:
    args, inputs = leaves(on_cuda(op.inputs(replace(size, dtype=torch.bfloat16))))
    graph, captured = graph_of(lambda: both(op, args, inputs))
    for lengths in (size.lengths or (), (70, 1, 64, size.T - 135)):
        args["cu_seqlens"].copy_(torch.tensor([0, *lengths]).cumsum(0))
        graph.replay()
        replayed = [x.clone() for x in captured]
        torch.testing.assert_close(replayed, both(op, args, inputs), rtol=0, atol=0)


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
    graph, o = graph_of(lambda: step(captured))
    for slots_now in ([0, 3, -1, 8, 5], [1, -1, 2, 4, 7]):
        index.copy_(torch.tensor(slots_now))
        captured.copy_(pool)
        graph.replay()
        want = pool.clone()
        assert torch.equal(o, step(want)) and torch.equal(captured, want)


# ---- torch.compile and CUDA graphs over every operator on a device, forward and backward.


# what Inductor makes of the code around a kernel differs by operator family, not by operator
WITH_INDUCTOR = ("chunk_gated_delta_rule", "chunk_kda", "chunk_simple_gla")
# compiled, these leave to Inductor what a plain call has kernels for, or sum in plain torch
BY_TORCH = ("gdn2", "mamba3", "mamba3-mimo", "attn-normalize")
CASES = [pytest.param(op, "aot_eager", id=op.name) for op in LINEAR] + [
    pytest.param(op, "inductor", id=f"{op.name}-inductor")
    for op in LINEAR
    if op.name in WITH_INDUCTOR
]


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
        want = both(op, args, inputs)
        for x, y in zip(got, want, strict=True):
            # the same kernels of the same inputs
            if backend == "aot_eager" and not op.name.endswith(BY_TORCH):
                torch.testing.assert_close(x, y, rtol=0, atol=0)
            # not element by element: what cancels shows every rounding between the kernels
            assert relative_error(x, y) <= 1e-2


# ---- Errors of what the plan chooses, by tensor, at odd widths and numbers of heads: of the
# linear family the worst that is allowed of outputs, of gradients, and of the gradients of gates
# and beta.


LIMIT_SIZES = {
    "one head": (Size(B=1, T=333, H=1, HV=1, K=30, V=256, M=30), "mixed"),
    "128 heads": (Size(B=1, T=70, H=128, HV=128, K=64, V=128, M=64), "mixed"),
    "packed": (packed(Size(K=256, V=30, M=100), 5, 0, 100, 65), "mixed"),
    "grouped": (Size(B=2, T=130, H=2, HV=4, K=100, V=60, M=60), "weak"),
    "128 mixed": (packed(Size(K=128, V=128, M=64), 5, 0, 200, 95), "mixed"),
    "zero": (Size(B=1, T=300, H=2, HV=2, K=128, V=128, M=64), "zero"),
    "256": (Size(B=1, T=300, H=2, HV=2, K=256, V=256, M=64), "mixed"),
    "few tokens": (Size(B=2, T=13, H=2, HV=4, K=100, V=60, M=30), "mixed"),
}
LIMIT_GATES = ("g", "gk", "gv", "w", "beta")
# outputs and final states, gradients, those of gates and beta, and of angles: relative RMS error.
# Turning all tokens alike changes no output, so that most of an angle's gradient cancels: in plain
# torch with tensors of 16 bits it is wrong by up to 2.3e-2 (chunk_mamba3-mimo, one head).
NARROW, WIDE_HEADS = (5e-3, 8e-3, 2e-2, 4e-2), (1e-4, 1e-4, 1e-4, 1e-4)
GATE_LIMITS = {torch.bfloat16: NARROW, torch.float16: NARROW, torch.float32: WIDE_HEADS}
SIZES_OF = {
    torch.bfloat16: ["one head", "128 heads", "packed", "128 mixed", "zero", "256"],
    torch.float16: ["grouped", "packed"],
    torch.float32: ["packed", "grouped", "one head"],
}
LIMIT_CASES = [(size, dtype) for dtype, sizes in SIZES_OF.items() for size in sizes]
RECURRENT = [op for op in LINEAR if "recurrent" in op.name]
# by the step kernel; and by chunks
FEW_AND_MANY = [("few tokens", dtype) for dtype in GATE_LIMITS]
FEW_AND_MANY += [("grouped", torch.bfloat16), ("packed", torch.float32)]


@pytest.mark.parametrize(("size", "dtype"), LIMIT_CASES, ids=str)
@every_chunked
def test_errors_are_within_their_limits(op: Sample, size: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    shape, gate = LIMIT_SIZES[size]
    args = op.inputs(replace(shape, dtype=dtype, gate=gate))
    expect_within(op, args, GATE_LIMITS[dtype], f"{op.name} {size}")


@pytest.mark.parametrize(("size", "dtype"), FEW_AND_MANY, ids=str)
@pytest.mark.parametrize("op", RECURRENT, ids=lambda op: op.name)
def test_errors_token_by_token_are_within_their_limits(
    op: Sample, size: str, dtype: torch.dtype
) -> None:
    test_errors_are_within_their_limits(op, size, dtype)


@pytest.mark.parametrize("lowest", [-0.001, -0.02])
def test_sharp_scores_of_gsa_are_within_limits(lowest: float) -> None:
    """Slots that hardly forget: scores of 8 and more, of which the softmax shows every error."""
    torch.manual_seed(2)
    op = next(x for x in CHUNKED if x.name == "chunk_gsa")
    args = op.inputs(replace(LIMIT_SIZES["zero"][0], dtype=torch.bfloat16))
    args["g"] = lowest * torch.rand_like(args["g"])
    expect_within(op, args, NARROW, f"gates from {lowest}")


def expect_within(op: Sample, args: dict[str, Any], limits: tuple, case: str) -> None:
    want, want_grads = run(op, cast(args, torch.float64), impl="reference")
    got, grads = run(op, on_cuda(args))
    outs, others, gates, angles = limits
    found = {f"output {i}": (x, y, outs) for i, (x, y) in enumerate(zip(got, want, strict=True))}
    most = dict.fromkeys(LIMIT_GATES, gates) | {"angles": angles}
    expected = by_name(op, args, want_grads)
    for name, x in by_name(op, args, grads).items():
        found[f"d{name}"] = (x, expected[name], most.get(name, others))
    errors = {n: (relative_error(x.cpu(), y), most) for n, (x, y, most) in found.items()}
    worst = {n: f"{e:.1e} of {most}" for n, (e, most) in errors.items() if not e <= most}
    assert not worst, f"{case}: {worst}"


# ---- The past keeps its bits when the future changes, on a CUDA device: every operator with time.


# what comes before a token is all that these see, and what attention's other rows see is not
AROUND = ("attention", "attention-gated", "short_convolution", "token_shift")
CAUSAL = [x for x in OPERATORS if x.op.startswith(("chunk_", "fused_")) or x.name in AROUND]
# with as many chunks as there are cuts: what Hopper's kernels take, and what they do not
PER_CHANNEL = ("chunk_kda", "chunk_gdn2", "chunk_dplr_delta_rule", "chunk_rwkv7", "chunk_gla")
CAUSAL_SIZES = {
    "wide": Size(B=1, T=150, H=2, HV=4, K=128, V=128, dtype=torch.bfloat16),
    "half": Size(B=2, T=150, H=1, HV=1, K=64, V=64, dtype=torch.float16),
    "odd": Size(B=1, T=70, H=1, HV=2, K=30, V=60),
}


@pytest.mark.parametrize("impl", [None, "triton"], ids=str)
@pytest.mark.parametrize("size", CAUSAL_SIZES)
@pytest.mark.parametrize("op", CAUSAL, ids=lambda op: op.name)
def test_past_keeps_its_bits(op: Sample, size: str, impl: str | None) -> None:
    if impl is not None and "impl" not in op.takes:
        impl = None
    shape = replace(CAUSAL_SIZES[size], state=bool(op.states))
    cuts = tuple(cut for cut in (*CUTS, 100) if cut < shape.T)
    # few numbers round otherwise where an intermediate result's last bit changes
    seeds = 0, 1, 2
    found = changed_bits(op, impl, shape, cuts, device=torch.device("cuda"), seeds=seeds)
    assert not found, f"{op.name}, {size}: {found}"


@pytest.mark.parametrize("impl", [None, "triton"], ids=str)
@pytest.mark.parametrize("op", [x for x in CAUSAL if x.name in PER_CHANNEL], ids=lambda op: op.name)
def test_past_of_small_keys_keeps_its_bits(op: Sample, impl: str | None) -> None:
    """Keys times 2^-24, none of whose entries is below 2^-46 but 0, and gates of which halves and
    quarters of 64 tokens decay by up to 2^-160, or will."""
    size = Size(B=1, T=128, H=8, HV=8, K=64, V=64, dtype=torch.bfloat16, gate="weak")
    torch.manual_seed(0)
    args = op.inputs(size, torch.device("cuda"))
    for name in ("k", "b", "beta") if "b" in args else ("k",):
        if name in args:
            small = args[name] * 2.0**-24
            args[name] = torch.where(small.abs() < 2.0**-46, 0.0, small)
    name = next(x for x in ("g", "gk", "w") if x in args)
    shape = args[name].shape
    rand = torch.rand(shape, device="cuda").to(args[name].dtype)
    odd = (torch.arange(128, device="cuda") // 16 % 2 == 1)[None, :, None, None]
    gates = {
        "weak": -0.1 * rand,
        "half": -6.6 * rand,
        "even": -3.4 + 0 * rand,
        "quarters": torch.where(odd, -6.9, -0.1 * rand),
        "strong": -50 * rand,
    }
    found = []
    with torch.no_grad():
        for before, past in gates.items():
            want = flat(op(args | {name: past}, **({"impl": impl} if impl else {})))[0]
            for after, future in gates.items():
                for cut in (12, 28, 44, 100):
                    g = torch.cat([past[:, :cut], future[:, cut:]], 1)
                    got = flat(op(args | {name: g}, **({"impl": impl} if impl else {})))[0]
                    if not torch.equal(bits(want[:, :cut]), bits(got[:, :cut])):
                        found.append((before, after, cut))
    assert not found, f"{op.name}: {found}"


# ---- A NaN in a gate or in an input reaches whatever depends on it, by every back end on a GPU.
# tests/kernels/test_blocks_interpreted.py has all operators and inputs, without a GPU.


GATES = ("gv", "g", "gk", "w")
ROWS = [
    x for x in LINEAR if x.op.startswith("chunk_") and any("T" in x.dims.get(n, "") for n in GATES)
]
SIZE = Size(B=1, T=256, H=2, HV=2, K=64, V=64, M=64, dtype=torch.bfloat16, state=False)


@pytest.mark.parametrize("gate", ["weak", "strong", "mixed"])
@pytest.mark.parametrize("impl", [None, "triton", "eager"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_nan_gate_reaches_later_outputs(row: Sample, impl: str | None, gate: str) -> None:
    for token in (70, 200):
        args = row.inputs(replace(SIZE, gate=gate))
        name = next(n for n in GATES if n in args)
        args[name][(0, token, 1, 3)[: args[name].dim()]] = torch.nan
        want = row.call(cast(args, torch.float64), impl="reference")[0].isnan()
        assert want[:, token:].any() and not want[:, :token].any()
        o = row.call(on_cuda(args), impl=impl)[0].cpu()
        assert o.isnan()[want].all() and o[:, :64].isfinite().all(), token


@pytest.mark.parametrize("impl", ["triton", "eager"])
@pytest.mark.parametrize("name", ["squared_relu", "glu_linear-squared_relu", "matmul-silu"])
def test_nan_reaches_activation(name: str, impl: str) -> None:
    (row,) = [x for x in TESTED if x.name == name]
    args = on_cuda(row.inputs(Size(T=37, D=64, C=128, dtype=torch.bfloat16)))
    x = next(iter(args.values()))
    x.view(-1, x.shape[-1])[5, 3] = torch.nan
    y = row.call(args, impl=impl)[0].flatten(0, -2)
    assert y[5].isnan().any() and y[:5].isfinite().all() and y[6:].isfinite().all()
