"""Every operator in a graph of torch.jit.trace, called with other inputs than those traced; some
run kernels, as on a GPU: sizes are tensors to torch.jit.trace."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from slipstream.runtime.autograd import is_tracing
from slipstream.runtime.custom_op import DirectCall
from slipstream.runtime.dispatch import Candidate, choose
from tests.support.derivatives import CASES, Case, Problem, assert_near, in_float32
from tests.support.interpreted import interpreted

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
# sizes are tensors there, whose roots are float32
ROUNDED = 1e-7
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
def test_traced_without_gradients(case: Case) -> None:
    """The gradients of the graph are those of the call, or there are none by name."""
    problem = Problem(case)
    with torch.no_grad():
        graph = problem.traced(problem.inputs)
    moved = problem.moved(1e-2)
    assert_near(list(graph(*moved)), list(problem.run(*moved)), ROUNDED)
    given = problem.leaves()
    total = problem.of_outputs(graph(*given))
    try:
        grads = torch.autograd.grad(total, given)
    except NotImplementedError as error:
        if "gradient" not in str(error):
            raise
        return
    assert_near(list(grads), problem.gradient(), ROUNDED)


@every_case
def test_traced_with_gradients(case: Case) -> None:
    problem = Problem(case)
    graph = problem.traced(problem.leaves())
    given = [x.clone().requires_grad_() for x in problem.moved(1e-2)]
    outputs, want = graph(*given), problem.run(*given)
    assert_near([x.detach() for x in outputs], [x.detach() for x in want], ROUNDED)
    grads = torch.autograd.grad(problem.of_outputs(outputs), given)
    wanted = torch.autograd.grad(problem.of_outputs(want), given)
    assert_near(list(grads), list(wanted), ROUNDED)


def test_calls_that_are_no_operators_are_called_again() -> None:
    """What a kernel writes, the tracer does not see."""

    def doubled(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
        y = torch.empty_like(x)
        y.numpy()[...] = n * x.detach().numpy()
        return y, y[:1]

    call = DirectCall(doubled)
    graph: Any = torch.jit.trace(lambda x: call(x, 2), torch.zeros(3), check_trace=False)
    x = torch.randn(3, requires_grad=True)
    y, z = graph(x.detach())
    assert torch.equal(y, 2 * x.detach()) and torch.equal(z, y[:1])
    with pytest.raises(NotImplementedError, match="traced without gradients"):
        graph(x)[0].sum().backward()


def test_sizes_are_integers_where_kernels_are_chosen() -> None:
    seen: list[Any] = []

    def unsupported_reason(x: Tensor) -> None:
        seen.extend([type(x.shape[0]), is_tracing()])

    def call(x: Tensor) -> Tensor:
        choose((Candidate("some", "", unsupported_reason),), x, None)
        assert is_tracing()
        return x + 1

    torch.jit.trace(call, torch.zeros(3), check_trace=False)
    assert seen == [int, False]


# one of each way from the public function to a launch
SOME = ["chunk_gla", "chunk_delta_rule", "chunk_gdn2", "chunk_gated_delta_product", "chunk_gsa"]
SOME += ["chunk_rwkv4", "chunk_rwkv7", "attention-packed", "latent_attention"]
SOME += ["rms_norm_gated-mamba2", "short_convolution-packed", "cross_entropy-mean"]

REPEATS = {torch.Tensor.repeat_interleave, torch.repeat_interleave}
BOUNDS = {torch.Tensor.clamp, torch.clamp}


class _SizesAreNumbers(TorchFunctionMode):
    """Refuses torch.jit.trace's sizes where they have to be on the GPU of the other tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [isinstance(x, Tensor) for x in (*args[1:], *(kwargs or {}).values())]
        # beside a number a bound is taken as one
        if (func in REPEATS and any(given)) or (func in BOUNDS and all(given)):
            raise TypeError(f"{func.__name__}: a size is a tensor of a CPU")
        return func(*args, **(kwargs or {}))


@interpreted
@pytest.mark.parametrize(
    "names", [SOME, pytest.param([], marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_traced_kernels_take_other_inputs(names: list[str]) -> None:
    assert set(names) <= {c.name for c in CASES}
    warnings.filterwarnings("ignore", ".*torch.jit.trace", DeprecationWarning)
    warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)  # pyright: ignore[reportPrivateImportUsage]
    for case in CASES:
        # the operator's own name is of an implementation on a CPU
        if case.name == "short_convolution-operator" or (names and case.name not in names):
            continue
        for grads in (False, True):
            torch.manual_seed(0)
            problem = Problem(in_float32(case))
            with _SizesAreNumbers():
                problem.expect_traced_is_the_call(grads)
