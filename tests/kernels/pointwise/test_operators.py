"""The torch.library operators of pointwise kernels, convolution and losses: opcheck, in plain torch
and through the kernels under Triton's interpreter, and the kernels in compiled graphs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.kernels.conv import op as conv
from slipstream.kernels.elementwise import copy_states, glu, place_tokens, rotary, token_shift
from slipstream.kernels.elementwise import glu as linear
from slipstream.kernels.loss import fused as loss
from slipstream.ops.activation import glu_linear
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
    yield "glu again", linear._call.overload, (other, x, x + 1, "silu")
    yield "glu again of one", linear._call.overload, (other, x, None, "relu2")
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
