"""Calls of KernelOps name arguments that are no tensors; their functions have the same ones."""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.kernels.elementwise import rotary
from slipstream.runtime import autograd, custom_op
from slipstream.runtime.autograd import Function, autograd_function
from slipstream.runtime.custom_op import KernelOp
from slipstream.runtime.symbolic_sizes import Size


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
    assert count > 60


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


# of the schema's other types: any value
_VALUES = {"float": 1.0, "Optional[float]": 1.0, "int": 1, "bool": False, "str": "triton"}


def risen(call: Callable[..., Any], args: list[Any], names: list[str]) -> list[str]:
    """Arguments with another version after the call."""
    tensors = {name: x for name, x in zip(names, args) if isinstance(x, Tensor)}
    versions = {name: x._version for name, x in tensors.items()}
    call(*args)
    return [name for name, x in tensors.items() if x._version > versions[name]]


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("name", [name for name, op in operators().items() if op._written])
def test_versions_rise_whatever_is_run(
    name: str, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd does not see what kernels write, here nothing: the operator says it."""
    op = operators()[name]
    schema = op.overload._schema
    args = [_VALUES.get(str(x.type), torch.zeros(2)) for x in schema.arguments]
    results = tuple(torch.zeros(2) for _ in schema.returns)
    found = results if len(results) > 1 else results[0] if results else None
    monkeypatch.setattr(op, "impl", lambda *_: found)
    names = [x.name for x in schema.arguments]
    written = [x.name for x in schema.arguments if x.alias_info and x.alias_info.is_write]
    with torch.autocast("cpu", enabled=autocast):
        assert risen(op, args, names) == written
        assert risen(op.overload, args, names) == written
    with torch.inference_mode():
        args = [x.clone() if isinstance(x, Tensor) else x for x in args]
    op(*args)  # they have no version


@cache
def registered() -> tuple[KernelOp, KernelOp]:
    """y = scale x + b, total = sum(x), and, if kept, x^2, which no caller sees."""

    def forward(x: Tensor, b: Tensor | None, scale: float, keep: bool) -> tuple[Tensor, ...]:
        y = scale * x if b is None else scale * x + b
        return y, x.sum(), x.square() if keep else x.new_empty(0)

    def backward(
        squares: Tensor, b: Tensor | None, dy: Tensor, scale: float, dtotal: Tensor | None
    ) -> list[Tensor]:
        assert squares.numel()
        dx = scale * dy if dtotal is None else scale * dy + dtotal
        return [dx] if b is None else [dy.sum(0), dx]

    op = KernelOp(
        "scaled_and_sum",
        "(Tensor x, Tensor? b, float scale, bool keep) -> (Tensor, Tensor, Tensor)",
        forward,
        lambda x, b, scale, keep: (torch.empty_like(x), x.new_empty(()), torch.empty_like(x)),
    )
    backward_op = KernelOp(
        "scaled_and_sum_backward",
        "(Tensor squares, Tensor? b, Tensor dy, float scale, Tensor? dtotal) -> Tensor[]",
        backward,
        lambda squares, b, *_: [squares] if b is None else [b, squares],
    )
    return op, backward_op


@pytest.fixture
def scaled_and_sum(monkeypatch: pytest.MonkeyPatch) -> type[Function]:
    """Other tests look at all gradients that are registered."""
    monkeypatch.setattr(autograd, "_GRADIENTS", {**autograd._GRADIENTS})
    return autograd_function(*registered(), results="y total squares", wrt="b x", keep=True)


@pytest.mark.parametrize("with_b", [False, True])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_autograd_function_joins_names(
    with_b: bool, used: tuple[int, ...], scaled_and_sum: type[Function]
) -> None:
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, dtype=torch.float64, requires_grad=True) if with_b else None
    found = scaled_and_sum.apply(x, b, 3.0)
    want = (3 * x if b is None else 3 * x + b), x.sum()
    assert len(found) == 2
    inputs = [t for t in (x, b) if t is not None]

    def grads(outputs: Any) -> Any:
        loss: Any = sum(outputs[n].sin().sum() for n in used)
        return torch.autograd.grad(
            loss, inputs, retain_graph=True, allow_unused=True, materialize_grads=True
        )

    torch.testing.assert_close(found, want)
    torch.testing.assert_close(grads(found), grads(want))
    by_dispatcher = torch.ops.slipstream._scaled_and_sum(x, b, 3.0, True)
    torch.testing.assert_close(grads(by_dispatcher), grads(want))


@pytest.mark.parametrize("name", sorted(operators()))
def test_probes_name_arguments_of_the_schema(name: str) -> None:
    """The tensors of a probe, and the parameters of the functions that make them."""
    op = operators()[name]
    probes = op._probe if isinstance(op._probe, tuple) else (op._probe,)
    for probe in probes:
        if isinstance(probe, dict):
            makers = [x for x in probe.values() if callable(x)]
            named = {*probe} | {y for x in makers for y in inspect.signature(x).parameters}
            assert named <= {*op._names}


def test_probes_get_numbers_that_no_record_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of a kind may be one that is recorded."""
    seen: list[Any] = []
    monkeypatch.setattr(custom_op, "compare", lambda *args, **_: seen.append(args[2]))
    op = operators()["slipstream._mhc_pre.default"]
    tensors = torch.randn(3, 2, 4), torch.randn(8, 8), torch.randn(8), torch.randn(3)
    three: Any = Size(None, "n", 3)  # pyright: ignore[reportArgumentType]
    op._mismatch((*tensors, 1e-6, 1e-6, three, 2.0, 0.0, False, "triton"))
    assert type(seen[0]["iterations"]) is int and seen[0]["iterations"] == 3


def test_calls_are_replayed_but_for_a_few() -> None:
    alone = {x.split(".")[-2].lstrip("_") for x, op in operators().items() if not op._replay}
    assert alone == {
        "attnres",
        "attnres_backward",
        "cross_entropy",
        "cross_entropy_backward",
        "embedding",
        "index",
        "index_loss",
        "linear_cross_entropy",
        "linear_kl_div",
        "linear_log_probs",
        "running_max",
        "softmax_append",
        "softmax_decode",
        "softmax_latent",
    }
