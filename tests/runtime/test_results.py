"""Results of Functions and operators may be changed in place: they are no views that torch refuses
to change, and share no elements. Tensors that the package makes for itself name a device, which is
set for all of tests/ops/test_user_inputs.py and of tests/nn/test_module_settings.py."""

import ast
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import slipstream
from slipstream.runtime import custom_op
from slipstream.runtime.autograd import Function
from tests.support.derivatives import CASES, Case, Problem
from tests.support.small_modules import SUBJECTS, leaves, total


def tensors_in(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return [z for y in x for z in tensors_in(y)] if isinstance(x, tuple | list) else []


def memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def subclasses(base: type) -> Iterator[type]:
    for cls in base.__subclasses__():
        yield cls
        yield from subclasses(cls)


def elements(x: Tensor) -> Tensor:
    """Which elements of its memory it has."""
    count = x.untyped_storage().nbytes() // x.element_size()
    return torch.arange(count).as_strided(x.shape, x.stride(), x.storage_offset()).flatten()


def share_elements(x: Tensor, y: Tensor) -> bool:
    if memory(x) != memory(y) or x.dtype != y.dtype:
        return memory(x) == memory(y)
    return bool(torch.isin(elements(x), elements(y)).any())


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that ran. One that returns a view which is neither of an input's memory nor of what it
    has saved fails the test."""
    ran: list[str] = []

    def checked(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(ctx: Any, *args: Any) -> Any:
            results = forward(ctx, *args)
            saved = getattr(ctx, "to_save", None) or ()
            others = {memory(x) for x in (*tensors_in(args), *tensors_in(saved))}
            views = [x for x in tensors_in(results) if x._is_view() and memory(x) not in others]
            assert not views, f"{name} returns views of {[tuple(x.shape) for x in views]}"
            ran.append(name)
            return results

        return run

    for cls in subclasses(Function):
        if "forward" in vars(cls):
            forward = staticmethod(checked(cls.__qualname__, vars(cls)["forward"].__func__))
            monkeypatch.setattr(cls, "forward", forward)
    return ran


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators whose results share elements fail the test."""
    as_bases = custom_op._as_bases

    def checked(results: Any, args: tuple) -> Any:
        found = tensors_in(results)
        assert not any(share_elements(x, y) for x, y in combinations(found, 2) if x is not y)
        return as_bases(results, args)

    monkeypatch.setattr(custom_op, "_as_bases", checked)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_operators_return_memory_of_their_own(
    case: Case, functions: list[str], operators: None
) -> None:
    problem = Problem(case)
    problem.run(*problem.leaves())


@pytest.mark.parametrize("name", SUBJECTS)
def test_modules_return_memory_of_their_own(
    name: str, functions: list[str], operators: None
) -> None:
    module, given = SUBJECTS[name].make(), SUBJECTS[name].inputs()
    total(module(*leaves(given))).backward()


ROOT = Path(slipstream.__file__).parent
FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"}
FACTORIES |= {"scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"}
# samples for tools, which a device may be the default of
ELSEWHERE = ("tools", "cli")
# makes parameters, which go where the user wants them
CONSTRUCTORS = {"__init__", "__call__"}


def unplaced(path: Path) -> list[str]:
    found: list[str] = []

    def visit(node: ast.AST, of_parameters: bool) -> None:
        if isinstance(node, ast.FunctionDef):
            of_parameters = node.name in CONSTRUCTORS
        if isinstance(node, ast.Call) and not of_parameters:
            name = ast.unparse(node.func)
            given = {x.arg for x in node.keywords}
            is_factory = name.removeprefix("torch.") in FACTORIES and name.startswith("torch.")
            if is_factory and not given & {"device", None}:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
            of_parameters = name.endswith("nn.Parameter")
        for child in ast.iter_child_nodes(node):
            visit(child, of_parameters)

    visit(ast.parse(path.read_text()), False)
    return found


def test_tensors_are_made_on_a_device_by_name() -> None:
    files = [x for x in ROOT.rglob("*.py") if x.relative_to(ROOT).parts[0] not in ELSEWHERE]
    assert [line for path in files for line in unplaced(path)] == []
