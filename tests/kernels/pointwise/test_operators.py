"""Operators of pointwise kernels: registration, strides under Triton's interpreter, and the
embedding's kernel and the one that only looks at ids, interpreted and compiled."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.compiler.aot import compile_kernel
from slipstream.kernels.conv import op as conv
from slipstream.kernels.elementwise import copy_states, glu, place_tokens, rotary, token_shift
from slipstream.kernels.elementwise.rotary import split_rotary
from slipstream.kernels.loss import fused as loss
from slipstream.ops.activation import geglu, glu_linear, swiglu
from slipstream.ops.rotary import rotary_embedding, rotary_tables
from slipstream.runtime import token_ids as guard
from slipstream.runtime.token_ids import raise_pending
from tests.support import wants
from tests.support.interpreted import error, interpreted

CU = torch.tensor([0, 2, 2, 9], dtype=torch.int32)
LOSS = (-100, 0.1, 5.0, 0.01, 0.9)


def cases() -> Iterator[tuple[str, Any, tuple]]:
    """Name, operator, and its arguments but for impl."""
    x, other = torch.randn(1, 9, 6), torch.randn(1, 9, 6)
    backward = glu.forward.backward
    assert backward is not None
    yield "glu", glu.forward.overload, (x, other, "silu")
    yield "glu of one", glu.forward.overload, (x, None, "relu2")
    yield "glu backward", backward.overload, (other, x, other, "gelu")
    yield "glu backward of one", backward.overload, (other, x, None, "relu2")
    yield "glu again", glu._call.overload, (other, x, x + 1, "silu")
    yield "glu again of one", glu._call.overload, (other, x, None, "relu2")
    heads, cos, places = torch.randn(1, 5, 2, 8), torch.randn(9, 3), torch.randint(0, 9, (1, 5))
    yield "rotary", rotary._call.overload, (heads, cos, cos, places, False, False)
    yield (
        "rotary backward",
        rotary._call.overload,
        (heads, cos[None, :5], cos[None, :5], None, True, True),
    )
    yield (
        "rotary joined",
        rotary._join.overload,
        (heads, heads[:, :, :1], other[:, :5, None, :1].expand(1, 5, 1, 8), *(cos[None, :5],) * 2),
    )
    state = torch.randn(3, 6)
    for back in (False, True):
        yield f"token_shift {back}", token_shift._call.overload, (x, state[:1], None, back)
        yield f"token_shift packed {back}", token_shift._call.overload, (x, state, CU, back)
    counts, tokens, gates = torch.tensor([4, 0, 2]), torch.randn(3, 7), torch.randn(3, 2)
    places = torch.randn(3, 5, 7), torch.randn(3, 5, 2)
    given = (counts, tokens, gates, *[None] * 4, *places, *[None] * 4)
    yield "place_tokens", place_tokens._call.overload, given
    pool, rows, slots = torch.randn(5, 2, 7, 3), torch.randn(3, 2, 3, 7), torch.tensor([4, -1, 2])
    yield "read states", copy_states._call.overload, (pool, slots, rows.mT, None)
    yield "write states", copy_states._call.overload, (rows.mT, None, pool, slots)
    weight, bias, past = torch.randn(6, 4), torch.randn(6), torch.randn(3, 6, 4)
    yield "conv", conv._call.overload, (x, weight, None, None, None, None, None, 0, True)
    yield "conv packed", conv._call.overload, (x, weight, bias, other, past, CU, None, 0, True)
    yield "conv apart", conv._call.overload, (x, weight, bias, None, past, CU, (3, 2, 1), 0, True)
    yield (
        "conv backward",
        conv._call_backward.overload,
        (other, None, None, x, weight, None, None, None, 0, False),
    )
    wide, taps, sizes = torch.randn(1, 9, 192), torch.randn(192, 3), (64, 64, 64)
    yield "conv units", conv._call.overload, (wide, taps, *(None,) * 4, sizes, 64, True)
    given = (*wide.cos().split(sizes, -1), wide, taps, None, None, None, 64, True)
    yield "conv units backward", conv._call_backward.overload, given
    packed = (*other.split(2, -1), x, weight, bias, past, CU, 0, True)
    yield "conv packed backward", conv._call_backward.overload, packed
    slots = torch.tensor([2, -1, 0])
    yield (
        "conv update",
        conv.call_update.overload,
        (x[0, :3], past, weight, bias, None, slots, True),
    )
    logits, target = torch.randn(5, 11), torch.tensor([0, 5, -100, 2, 3])
    yield "cross_entropy", loss._call.overload, (logits, target, *LOSS)
    given = (logits, target, torch.logsumexp(5 * torch.tanh(0.9 * logits / 5), -1), torch.rand(5))
    yield "cross_entropy backward", loss._call_backward.overload, (*given, *LOSS)


def copies(args: tuple) -> tuple:
    return tuple(x.clone() if isinstance(x, Tensor) else x for x in args)


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case[0])
def test_operators_pass_opcheck(case: tuple) -> None:
    _, operator, args = case
    torch.library.opcheck(operator, (*copies(args), "eager"))


@pytest.mark.parametrize(
    "case", [c for c in cases() if "(a!)" not in str(c[1]._schema)], ids=lambda c: c[0]
)
@pytest.mark.sample(which=lambda case: case[0] in ("glu", "rotary", "conv packed", "cross_entropy"))
def test_operators_pass_opcheck_in_float64_and_with_strides(case: tuple) -> None:
    _, operator, args = case
    wide = tuple(
        x.double().mT.contiguous().mT if isinstance(x, Tensor) and x.is_floating_point()
        and x.dim() > 1 else x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in args
    )  # fmt: skip
    torch.library.opcheck(operator, (*wide, "eager"))


def check_operators() -> None:
    """What the kernels write to and the shapes they give, and what plain torch gives."""
    for name, operator, args in cases():
        test_utils = ("test_schema", "test_faketensor")
        torch.library.opcheck(operator, (*copies(args), "triton"), test_utils=test_utils)
        moved = copies(args), copies(args)
        got = operator(*moved[0], "triton")
        want = operator(*moved[1], "eager")
        pairs = zip(*([x] if isinstance(x, Tensor) else x or () for x in (got, want)), strict=True)
        for x, y in (*pairs, *zip(*moved)):
            # where a token stands is told by the kernels alone
            if isinstance(x, Tensor) and x.is_floating_point():
                assert error(x, y) < 2e-5, name


def check_compiled() -> None:
    """A graph with the kernel in it, of two lengths, gives what the call gives."""
    cos, sin = ops.rotary_tables(torch.arange(40), 6)
    layer, taps = torch.randn(5, 6), torch.randn(6, 4)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "swiglu": lambda x: ops.swiglu(x, x + 1, impl="triton"),
        "glu_linear": lambda x: glu_linear(x, x + 1, layer, impl="triton"),
        "rotary": lambda x: ops.rotary_embedding(x[:, :, None], cos, sin, impl="triton"),
        "token_shift": lambda x: ops.token_shift(x, impl="triton")[0],
        "conv": lambda x: ops.short_convolution(x, taps, impl="triton")[0],
        "cross_entropy": lambda x: ops.cross_entropy(x, x[..., 0].long() * 0, impl="triton"),
    }
    for name, call in calls.items():
        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
        for n, T in enumerate((9, 21)):
            x = torch.randn(2, T, 6, requires_grad=True)
            with torch._dynamo.config.patch(error_on_recompile=n > 0):
                y = compiled(x)
            want = call(x)
            assert error(y, want) < 1e-5, name
            grads = [torch.autograd.grad(z.square().sum(), x)[0] for z in (y, want)]
            assert error(*grads) < 1e-5, name


@interpreted
def test_kernels_of_the_operators_interpreted() -> None:
    check_operators()
    check_compiled()


@interpreted
def test_triton_pointwise_takes_strides() -> None:
    wide = torch.randn(2, 3, 2050, requires_grad=True)
    for call in (swiglu, geglu):
        found = []
        for impl in ("triton", "eager"):
            y = call(*wide.chunk(2, -1), impl=impl)
            found.append([y, *torch.autograd.grad(y.sin().sum(), wide)])
        assert max(error(x, y) for x, y in zip(*found)) < 1e-5
    packed = torch.randn(2, 7, 3, 5, 12, requires_grad=True)
    tables = rotary_tables(torch.arange(20), 6)  # 3 pairs: not as many as a block has
    rows = [table[torch.randint(0, 20, (n, 7))] for n in (1, 2) for table in tables]
    cases = [(tables, None), (tables, torch.randperm(20)[:7]), (rows[:2], None), (rows[2:], None)]
    for (cos, sin), positions in cases:
        for interleaved in (False, True):
            found = []
            for impl in ("triton", "eager"):
                y = rotary_embedding(
                    packed[:, :, 1], cos, sin,
                    positions=positions, interleaved=interleaved, impl=impl,
                )  # fmt: skip
                found.append([y, *torch.autograd.grad(y.sin().sum(), packed)])
            assert max(error(x, y) for x, y in zip(*found)) < 1e-5
    check_heads()


def check_heads() -> None:
    """q, k and v of one tensor, whose gradients are written into one, against rotary_embedding."""
    wide, sizes = torch.randn(2, 7, 3 * 6 * 12, requires_grad=True), (3, 2, 1)
    for features, rows in ((12, 1), (8, 2)):
        cos, sin = rotary_tables(torch.randint(0, 20, (rows, 7)), features)
        qkv = wide.unflatten(-1, (-1, 12))[:, :, 5:11]
        dq, dk, dv = torch.randn(2, 7, 6, 12).split(sizes, 2)
        found = []
        for ours in (True, False):
            if ours:
                q, k, v = split_rotary(qkv, cos, sin, sizes, "triton")
            else:
                q, k, v = qkv.split(sizes, 2)
                q, k = (rotary_embedding(x, cos, sin, impl="eager") for x in (q, k))
            found.append([q, k, v, *torch.autograd.grad((q, k, v), wide, (dq, dk, dv))])
        assert max(error(x, y) for x, y in zip(*found)) < 1e-5


SCANS = ["ids", "ids but for one", "ids counted", "indices", "some indices", "offsets"]


@wants.triton
@pytest.mark.parametrize("kind", SCANS)
def test_scans_compile(kind: str) -> None:
    some = {"lengths_ptr": "*i32", "rows_ptr": "*i64"} if "some" in kind else {}
    count = {"inverse_count_ptr": "*fp32"} if "counted" in kind else {}
    got = compile_kernel(
        "slipstream.runtime.token_ids_kernel:scan_ids_kernel",
        {"ids_ptr": "*i32" if "ind" in kind else "*i64", "slots_ptr": "*i64", **some, **count},
        {
            "KIND": kind.split()[-1 if "some" in kind else 0],
            "HAS_IGNORED": "one" in kind or bool(count),
            "B": 4096 if count else 1024,
        },
        warps=8 if count else 4,
    )
    assert got.stack == 0


def message() -> str:
    try:
        raise_pending()
    except ValueError as error:
        return str(error)
    return ""


@wants.triton
@interpreted
def test_triton_embedding_reads_rows_and_finds_wrong_ids() -> None:
    from slipstream.kernels.elementwise.triton import embedding
    from slipstream.runtime import token_ids_kernel

    for modules in (token_ids_kernel, embedding):
        modules.SLOTS = 4  # several blocks a program
    token_ids_kernel.BLOCK = 8
    for shape, D in [((2, 30), 5), ((7,), 12), ((1, 700), 1500), ((0, 3), 4), ((2, 2, 3), 16)]:
        for dtype in (torch.int32, torch.int64):
            ids, weight = torch.randint(0, 9, shape, dtype=dtype), torch.randn(9, D)
            with torch.inference_mode():
                assert torch.equal(embedding.gather(ids, weight), weight[ids.long()])
            for table in (weight, torch.randn(D, 9).T, torch.randn(9, 2 * D)[:, :D]):
                y = embedding.gather(ids, table)
                assert torch.equal(y, table[ids.long()]), (shape, D)
            if ids.numel():
                token_ids_kernel.scan("target", ids, 9, None)
            assert message() == ""
    ids, weight = torch.randint(0, 9, (3, 300)), torch.randn(9, 5)
    for wrong in (9, -1, 27, 1 << 40, -(1 << 62)):
        ids[0, 299], ids[1, 17], ids[2, 5] = 3, wrong, 1 << 33
        y = embedding.gather(ids, weight)
        assert torch.equal(y, weight[ids.clamp(0, 8)])
        want = f"input_ids: id {wrong} at position (1, 17) is outside the vocabulary of 9"
        assert message() == want, message()
        assert message() == ""
        token_ids_kernel.scan("target", ids.flatten(), 9, wrong)
        last = 2 * 300 + 5
        assert message() == f"target: id {1 << 33} at position ({last},) is outside the " + (
            "vocabulary of 9"
        )
    token_ids_kernel.scan("target", torch.tensor([0, -100, 8, -100]), 9, -100)
    assert message() == "" and not guard._watches[0].slots.any()
