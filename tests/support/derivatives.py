"""Every operator as a function of its floating tensors, and the ways of differentiating it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from slipstream import ops
from slipstream.kernels.conv import op as conv_op
from slipstream.kernels.conv.inputs import ConvInputs
from slipstream.tools.catalog import Sample
from tests.support.operators import FIXED, TESTED, Size, block_size, leaves

Args = dict[str, Any]

Run = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """call takes what `inputs` makes, in float64, and gives tensors."""

    name: str
    call: Callable[[Args], list[Tensor]]
    inputs: Callable[[], Args]

    @property
    def public_name(self) -> str:
        """The function's name in errors, as a pattern: the case's name begins with it."""
        if self.name == "short_convolution-operator":  # called as no public function does
            return "slipstream(::short_convolution)?"
        name = self.name.partition("-")[0]
        return rf"slipstream\.ops\.{'rotary_embedding' if name == 'rotary' else name}"

    def flat(self) -> tuple[Run, list[Tensor]]:
        """The call as a function of its floating tensors alone, and these."""
        args = self.inputs()
        given, inputs = leaves(args)

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            rest = iter(tensors)

            def next_of(x: Any) -> Any:
                if isinstance(x, tuple):
                    return tuple(next_of(y) for y in x)
                return next(rest) if isinstance(x, Tensor) and x.is_floating_point() else x

            return tuple(self.call({n: x if n in FIXED else next_of(x) for n, x in given.items()}))

        return run, [x.detach() for x in inputs]


SMALL = Size(B=1, T=5, H=1, HV=2, K=3, V=2, M=3, dtype=torch.float64)


def _of_row(row: Sample) -> Case:
    linear = row.op.startswith(("chunk_", "fused_recurrent_"))
    size = SMALL if linear else block_size(5, 6, torch.float64)
    return Case(row.name, row.call, lambda: row.inputs(size))


def _convolved(args: Args) -> list[Tensor]:
    """The operator of the Triton kernel, by plain torch; nothing is contiguous."""
    x, weight = args["x"].mT, args["weight"].mT
    inputs = ConvInputs(x, weight, args["bias"], None, args["state"], None)
    return conv_op.convolution(inputs, True, "eager")


def _convolution() -> Args:
    shapes = {"x": (1, 6, 5), "weight": (3, 6), "bias": (6,), "state": (1, 6, 3)}
    return {name: torch.randn(x, dtype=torch.float64) for name, x in shapes.items()}


def _packed_attention(args: Args) -> list[Tensor]:
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32, device=args["q"].device)
    return [
        ops.flash_attn_varlen_func(**args, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True)
    ]


def _latent(args: Args) -> list[Tensor]:
    lengths = torch.tensor([3, 4], device=args["q"].device)
    return [ops.latent_attention(**args, lengths=lengths, width=6, scale=0.3)]


def _wide(**shapes: tuple[int, ...]) -> Args:
    return {name: torch.randn(x, dtype=torch.float64) for name, x in shapes.items()}


def _heads(*shape: int) -> Callable[[], Args]:
    return lambda: _wide(**dict.fromkeys("qkv", (*shape, 2, 6)))


def _square() -> Args:
    return {name: torch.randn(2, 5, 2, 6, dtype=torch.float64) for name in "qkv"}


CASES = [
    *map(_of_row, TESTED),
    Case("short_convolution-operator", _convolved, _convolution),
    # heads and widths for which torch's own attention is taken
    Case("attention-square", lambda args: [ops.attention(**args)], _square),
    # by other libraries' names
    Case("flash_attn_func", lambda args: [ops.flash_attn_func(**args, causal=True)], _heads(2, 5)),
    Case("flash_attn_varlen_func", _packed_attention, _heads(5)),
    Case(
        "causal_conv1d_fn",
        lambda args: [ops.causal_conv1d_fn(**args, activation="silu")],
        lambda: _wide(x=(2, 6, 5), weight=(6, 3), bias=(6,)),
    ),
    Case("latent_attention", _latent, lambda: _wide(q=(2, 1, 2, 8), latent=(2, 5, 8))),
]


def in_float32(case: Case, device: str = "cpu") -> Case:
    """As the kernels take it."""

    def move(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(move(y) for y in x)
        if isinstance(x, Tensor):
            return (x.float() if x.is_floating_point() else x).to(device)
        return x

    return Case(case.name, case.call, lambda: {name: move(x) for name, x in case.inputs().items()})


# the other names an implementation on a CPU
ON_CUDA = [in_float32(c, "cuda") for c in CASES if c.name != "short_convolution-operator"]


class Problem:
    """A scalar of a case's inputs, whose gradient depends on them, and directions to go in."""

    def __init__(self, case: Case) -> None:
        self.run, self.inputs = case.flat()
        self.weights = [torch.randn_like(x) for x in self.run(*self.inputs)]
        self.directions = [torch.randn_like(x) for x in self.inputs]

    def value(self, *tensors: Tensor) -> Tensor:
        return self.of_outputs(self.run(*tensors))

    def of_outputs(self, outputs: tuple[Tensor, ...]) -> Tensor:
        total = outputs[0].new_zeros((), dtype=torch.float64)
        for x, w in zip(outputs, self.weights, strict=True):
            total = total + (w * (x + x.square())).sum()
        return total

    def leaves(self) -> list[Tensor]:
        return [x.clone().requires_grad_() for x in self.inputs]

    def gradient(self, inputs: list[Tensor] | None = None) -> list[Tensor]:
        given = self.leaves() if inputs is None else [x.clone().requires_grad_() for x in inputs]
        return list(torch.autograd.grad(self.value(*given), given))

    def moved(self, step: float) -> list[Tensor]:
        return [x + step * d for x, d in zip(self.inputs, self.directions)]

    def traced(self, inputs: list[Tensor]) -> Run:
        """The call as torch.jit.trace records it with these inputs."""
        graph: Any = torch.jit.trace(self.run, tuple(inputs), check_trace=False)
        return graph

    def expect_traced_is_the_call(self, grads: bool) -> None:
        """With other inputs than it was traced with. What kernels write outside of operators,
        torch.jit.trace does not see."""
        with torch.set_grad_enabled(grads):
            graph = self.traced(self.leaves() if grads else self.inputs)
        given = [x.clone().requires_grad_(grads) for x in self.moved(1e-2)]
        outputs, want = graph(*given), self.run(*given)
        torch.testing.assert_close(outputs, want, rtol=1e-4, atol=1e-5)
        if grads:
            got = torch.autograd.grad(self.of_outputs(outputs), given)
            expected = torch.autograd.grad(self.of_outputs(want), given)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)

    def change_of_value(self) -> Tensor:
        h = 1e-5
        return (self.value(*self.moved(h)) - self.value(*self.moved(-h))) / (2 * h)

    def change_of_gradient(self) -> list[Tensor]:
        h = 1e-5
        pairs = zip(self.gradient(self.moved(h)), self.gradient(self.moved(-h)))
        return [(x - y) / (2 * h) for x, y in pairs]


def assert_near(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-10) -> None:
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        size = max(float(y.abs().max()) if y.numel() else 0.0, 1.0)
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * size)


def _grad(problem: Problem) -> tuple[list[Tensor], list[Tensor]]:
    every = tuple(range(len(problem.inputs)))
    return list(torch.func.grad(problem.value, every)(*problem.inputs)), problem.gradient()


def _jvp(problem: Problem) -> tuple[list[Tensor], list[Tensor]]:
    given = tuple(problem.inputs), tuple(problem.directions)
    return [torch.func.jvp(problem.value, *given)[1]], [problem.change_of_value()]


def _dual(problem: Problem) -> tuple[list[Tensor], list[Tensor]]:
    pairs = zip(problem.inputs, problem.directions)
    with forward_ad.dual_level():
        value = problem.value(*(forward_ad.make_dual(x, d) for x, d in pairs))
        tangent = forward_ad.unpack_dual(value).tangent
    assert tangent is not None
    return [tangent], [problem.change_of_value()]


def _second(problem: Problem, beside_first: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    given = problem.leaves()
    total = problem.value(*given)
    first = torch.autograd.grad(total, given, create_graph=True)
    assert_near([x.detach() for x in first], problem.gradient())
    penalty = sum((x * d).sum() for x, d in zip(first, problem.directions))
    want = problem.change_of_gradient()
    if beside_first:
        penalty = penalty + total
        want = [x + y for x, y in zip(want, problem.gradient())]
    assert isinstance(penalty, Tensor)
    got = torch.autograd.grad(penalty, given, allow_unused=True, materialize_grads=True)
    return list(got), want


WAYS: dict[str, Callable[[Problem], tuple[list[Tensor], list[Tensor]]]] = {
    "grad": _grad,
    "jvp": _jvp,
    "dual": _dual,
    "second": _second,
    "second-beside-first": lambda problem: _second(problem, beside_first=True),
}
