"""Every operator as a function of its floating tensors, and the ways of differentiating it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from slipstream import ops
from slipstream.kernels.conv import op as conv_op
from tests.support.blocks import BLOCKS, Block
from tests.support.operators import OPERATORS, Operator, Size, flat, leaves, widen

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
        """What errors call the function, as a pattern: the case's name begins with it."""
        if self.name == "short_convolution-operator":  # called as no public function does
            return "slipstream::short_convolution"
        name = self.name.partition("-")[0]
        return rf"slipstream\.ops\.{'rotary_embedding' if name == 'rotary' else name}"

    def flat(self) -> tuple[Run, list[Tensor]]:
        """The call as a function of its floating tensors alone, and these."""
        args = self.inputs()
        fixed = {name: args[name] for name in ("cos", "sin") if name in args}
        given, inputs = leaves({name: x for name, x in args.items() if name not in fixed})

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            rest = iter(tensors)

            def next_of(x: Any) -> Any:
                if isinstance(x, tuple):
                    return tuple(next_of(y) for y in x)
                return next(rest) if isinstance(x, Tensor) and x.is_floating_point() else x

            return tuple(self.call({**{name: next_of(x) for name, x in given.items()}, **fixed}))

        return run, [x.detach() for x in inputs]


SMALL = Size(B=1, T=5, H=1, HV=2, K=3, V=2, M=3)


def _of_operator(op: Operator) -> Case:
    return Case(op.name, lambda args: flat(op(args)), lambda: op.inputs(SMALL, torch.float64))


def _of_block(block: Block) -> Case:
    return Case(block.name, block, lambda: widen(block.inputs(5, 6)))


def _product(T: int, D: int) -> Args:
    more = {"bias": torch.randn(3), "residual": torch.randn(T, 3)}
    return {"a": torch.randn(T, D), "b": torch.randn(D, 3), **more}


def _teach(student: Tensor, student_weight: Tensor, student_bias: Tensor, **options: Any) -> Tensor:
    like = {"dtype": student.dtype, "device": student.device}
    teacher = torch.linspace(-1, 1, 2 * student.shape[0], **like).view(-1, 2)
    weight = torch.linspace(1, -2, 10, **like).view(5, 2)
    given = (student, student_weight, teacher, weight)
    return ops.linear_kl_div(*given, student_bias=student_bias, **options)


def _student(T: int, D: int) -> Args:
    weight = {"student_weight": torch.randn(5, D), "student_bias": torch.randn(5)}
    return {"student": torch.randn(T, D), **weight}


def _convolved(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor, **_: Any) -> Tensor:
    """The operator of the Triton kernel, by plain torch; nothing is contiguous."""
    return conv_op.convolution(x.mT, weight.mT, bias, None, state, None, True, "eager")


def _square(T: int, D: int) -> Args:
    return {name: torch.randn(2, T, 2, D) for name in "qkv"}


def _refer(*_: Any, **__: Any) -> Any:
    raise AssertionError("these rows have no reference")


MORE = [
    Block("matmul", ops.matmul, _refer, _product),
    Block("matmul-silu", ops.matmul, _refer, _product, {"activation": "silu"}),
    *[Block(f"linear_kl_div-{r}", _teach, _refer, _student, {"reduction": r})
      for r in ("mean", "none")],
    Block("short_convolution-operator", _convolved, _refer,
          lambda T, D: {"x": torch.randn(1, D, T), "weight": torch.randn(3, D),
                        "bias": torch.randn(D), "state": torch.randn(1, D, 3)}),
    Block("attention-square", ops.attention, _refer, _square),
]  # fmt: skip


CASES = [*map(_of_operator, OPERATORS), *map(_of_block, (*BLOCKS, *MORE))]


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
