"""Calls of KernelOps name arguments that are no tensors; their functions have the same ones."""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slipstream import kernels
from slipstream.kernels.pointwise import rotary
from slipstream.runtime.custom_op import KernelOp


@cache
def modules() -> list[ModuleType]:
    """Those of the families that do not need a compiler."""
    found = pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")
    names = [x.name for x in found if not {"triton", "sm90"} & set(x.name.split("."))]
    return [importlib.import_module(name) for name in names]


def operators() -> dict[str, KernelOp]:
    ops = [x for module in modules() for x in vars(module).values() if isinstance(x, KernelOp)]
    return {str(op.overload): op for op in ops}


def calls(module: ModuleType, source: str) -> Iterator[tuple[ast.Call, KernelOp]]:
    """Where the source of a module calls a KernelOp by its name there, or by its own module's."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        owner, name = module, getattr(node.func, "id", "")
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            owner, name = getattr(module, node.func.value.id, None), node.func.attr
        op = getattr(owner, name, None)
        if isinstance(op, KernelOp):
            yield node, op


def unnamed(call: ast.Call, op: KernelOp) -> list[str]:
    """Arguments by position that are not tensors. Starred ones are tensors or a NamedTuple."""
    names = {x.name: "Tensor" in str(x.type) for x in op.overload._schema.arguments}
    found, is_starred = [], False
    for arg, (name, is_tensor) in zip(call.args, names.items()):
        is_starred |= isinstance(arg, ast.Starred)
        if not is_starred and not is_tensor:
            found.append(f"{name}={ast.unparse(arg)}")
    for arg in call.args if is_starred else ():
        written = getattr(arg, "id", getattr(arg, "attr", None))
        is_number = isinstance(arg, ast.Constant) and arg.value is not None
        if is_number or not names.get(str(written), True):
            found.append(ast.unparse(arg))
    return found


def test_calls_name_what_is_not_a_tensor() -> None:
    wrong, count = [], 0
    for module in modules():
        for call, op in calls(module, Path(str(module.__file__)).read_text()):
            count += 1
            wrong += [f"{module.__name__}:{call.lineno} {x}" for x in unnamed(call, op)]
    assert not wrong
    assert count > 70


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("_call(x, cos, sin, None, False, back=True, impl=impl)", ["interleaved=False"]),
        ("_call(*tensors, False, back=True, impl=impl)", ["False"]),
        ("_call(dy, *saved, ctx.interleaved, back=True, impl=impl)", ["ctx.interleaved"]),
        ("_call(dy, *saved, interleaved=ctx.interleaved, back=True, impl=impl)", []),
    ],
)
def test_flag_by_position_is_found(source: str, found: list[str]) -> None:
    [(call, op)] = calls(rotary, source)
    assert unnamed(call, op) == found


@pytest.mark.parametrize("name", sorted(operators()))
def test_functions_take_the_schema(name: str) -> None:
    """The implementation and the fake one are called by position."""
    op = operators()[name]
    wanted = [x.name for x in op.overload._schema.arguments]
    for function in (op.impl, op.fake):
        parameters = inspect.signature(function).parameters.values()
        given = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
        assert given == wanted[: len(given)]
        rest: Any = [x for x in parameters if x.kind is x.VAR_POSITIONAL]
        assert rest or len(given) == len(wanted)


@pytest.mark.parametrize(
    "named",
    [
        {"back": False, "interleaved": False, "impl": "eager"},  # two flags in other places
        {"interleaved": False, "back": False},
        {"interleaved": False, "back": False, "impl": "eager", "further": 1},
    ],
)
def test_other_names_or_orders_are_refused(named: dict[str, Any]) -> None:
    x, table = torch.randn(1, 4, 2, 8), torch.randn(4, 4)
    with pytest.raises(TypeError, match=r"want .*'interleaved', 'back', 'impl'.* by name, got"):
        rotary._call(x, table, table, None, **named)
