"""A function with fla's arguments that calls one of Slipstream's."""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream import ops
from slipstream.compat.fla.ops.cp.context import plan_of
from slipstream.integrations.usage import counted

Arguments = dict[str, Any]

# what fla's kernels can use and Slipstream's have no need of; the result is the same without
HINTS = frozenset(
    {"checkpoint_level", "chunk_indices", "cu_seqlens_cpu", "disable_recompute", "max_num_seqs",
     "use_graph"}
)  # fmt: skip
# what Slipstream does not have, and the value that asks for nothing
REFUSED: Mapping[str, Any] = {"output_attentions": False, "return_intermediate_states": False}
# read by its name: Slipstream's context, which has the offsets too
CONTEXT = "cp_context"
# of one dtype in Slipstream; fla promotes
ACTIVATIONS = ("q", "r", "k", "v", "p", "a", "b", "s")


@dataclass(frozen=True)
class Operator:
    """One row of the table: a function of fla, and what it is here.

    Attributes:
        path: the module of fla that defines it, without `fla.`; its parents export it too.
        name: fla's name.
        signature: fla's parameters, as `q, k, scale=None, *, g=None, **kwargs`. With **kwargs,
            keywords of `function` that are not listed are passed on, as fla's function reads them
            (chunk_size, A_log).
        renamed: fla's names of arguments that Slipstream calls otherwise.
        change: maps the arguments, by Slipstream's names, to those of the call.
        result: maps what `function` returns to what fla returns.
        note: what differs, for the migration page.
        other: Slipstream's function where slipstream.ops has none of this name.
    """

    path: str
    name: str
    signature: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    change: Callable[[Arguments], Arguments] | None = None
    result: Callable[[Any], Any] | None = None
    note: str = ""
    other: Callable[..., Any] | None = None

    @property
    def function(self) -> Callable[..., Any]:
        return self.other or getattr(ops, self.name)


def parse_signature(text: str) -> inspect.Signature:
    """The signature that `q, k, scale=None, *, g=None, **kwargs` stands for."""
    return inspect.signature(eval(f"lambda {text}: None"))  # of the tables here


def adapt(row: Operator) -> Callable[..., Any]:
    """The function that a row of the table describes."""
    signature = parse_signature(row.signature)
    parameters = signature.parameters.values()
    positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    call = row.function
    ours = inspect.signature(call).parameters
    # fla's names of arguments and ours
    targets = {
        p.name: row.renamed.get(p.name, p.name)
        for p in parameters
        if p.kind is not p.VAR_KEYWORD and p.name not in {*HINTS, *REFUSED, CONTEXT}
    }
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        targets = {name: name for name in ours} | targets
    # fla's defaults where ours are others
    defaults = {
        targets[p.name]: p.default
        for p in parameters
        if (x := ours.get(targets.get(p.name, ""))) is not None
        and p.default is not p.empty
        and p.default != x.default
    }
    activations = tuple(name for name in ACTIVATIONS if name in ours)
    flags = {name for name, x in ours.items() if x.annotation is bool}

    def function(*args: Any, **kwargs: Any) -> Any:
        if args:
            _check_positional(row.name, positional, args, kwargs)
            kwargs = dict(zip(positional, args)) | kwargs
        given = defaults.copy()
        for name, value in kwargs.items():
            if name in targets:
                target = targets[name]
                # models hand on what they were given: use_cache=None is False
                given[target] = bool(value) if target in flags and value is None else value
            elif name not in HINTS and name != CONTEXT:
                given |= _read_other(row.name, name, value, kwargs)
        if kwargs.get(CONTEXT) is not None:
            if CONTEXT not in signature.parameters:
                raise NotImplementedError(f"{CONTEXT}: fla's {row.name} does not have it")
            given = with_context(given, kwargs[CONTEXT])
        if row.change is not None:
            given = row.change(given)
        dtype = None
        if _dtypes_differ(given, activations):
            given, dtype = with_one_dtype(given, activations)
        result = call(**given)
        if dtype is not None:
            result = _cast_output(result, dtype)
        return result if row.result is None else row.result(result)

    function.__name__ = function.__qualname__ = row.name
    function.__module__ = f"slipstream.compat.fla.{row.path}"
    function.__doc__ = (
        f"fla.{row.path}.{row.name} on slipstream.ops.{call.__name__}, "
        "whose arguments it has under fla's names and in fla's order."
    )
    function.__signature__ = signature  # type: ignore[attr-defined]
    return counted("fla", f"{row.path}.{row.name}")(function)


def autograd_function(name: str, function: Callable[..., Any], signature: str) -> type:
    """fla's class of that name, whose apply() is a call of the function: gradients are its own."""
    forward = parse_signature(signature)
    known = inspect.signature(function).parameters
    unlisted = any(p.kind is p.VAR_KEYWORD for p in known.values())

    def apply(*args: Any) -> Any:
        bound = forward.bind(*args)
        given = {}
        for key, value in bound.arguments.items():
            if value is not forward.parameters[key].default:
                given[key] = value
        return function(**{k: v for k, v in given.items() if k in known or unlisted})

    apply.__signature__ = forward  # type: ignore[attr-defined]
    members = {"apply": staticmethod(apply), "__module__": function.__module__}
    members["__doc__"] = f"{function.__name__}, by fla's order of arguments."
    return type(name, (torch.autograd.Function,), members)


def with_context(given: Arguments, cp_context: Any) -> Arguments:
    """The arguments with the context's plan in place of `cu_seqlens`, if there is a context."""
    plan = plan_of(cp_context)
    return given if plan is None else given | {"context": plan, "cu_seqlens": None}


def _check_positional(
    name: str, positional: tuple[str, ...], args: tuple[Any, ...], kwargs: Arguments
) -> None:
    if len(args) > len(positional):
        raise TypeError(
            f"{name}() takes {len(positional)} positional arguments but {len(args)} were given"
        )
    for argument in positional[: len(args)]:
        if argument in kwargs:
            raise TypeError(f"{name}() got multiple values for argument '{argument}'")


def _read_other(function: str, name: str, value: Any, kwargs: Arguments) -> Arguments:
    """The arguments that stand for one that is no parameter of Slipstream's function."""
    if name in REFUSED:
        if value is not REFUSED[name]:
            raise NotImplementedError(f"{name}: Slipstream's {function} does not have it")
    elif name == "transpose_state_layout":
        if kwargs.get("state_v_first"):
            raise ValueError("transpose_state_layout: want one of it and state_v_first, got both")
        warnings.warn(
            "transpose_state_layout is deprecated and called state_v_first",
            DeprecationWarning,
            stacklevel=3,
        )
        return {"state_v_first": value}
    elif name == "head_first":
        if value:
            raise NotImplementedError("head_first: transpose the inputs to [B, T, H, ...]")
    else:
        raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")
    return {}


def _dtypes_differ(given: Arguments, activations: tuple[str, ...]) -> bool:
    first = None
    for name in activations:
        x = given.get(name)
        if isinstance(x, Tensor):
            if first is None:
                first = x.dtype
            elif x.dtype != first:
                return True
    return False


def with_one_dtype(given: Arguments, activations: tuple[str, ...]) -> tuple[Arguments, torch.dtype]:
    """The arguments with activations of one dtype, and v's, in which fla returns o."""
    tensors = {n: x for n in activations if isinstance(x := given.get(n), Tensor)}
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors.values()))
    return given | {n: x.to(dtype) for n, x in tensors.items()}, tensors["v"].dtype


def _cast_output(result: Any, dtype: torch.dtype) -> Any:
    if isinstance(result, tuple):
        return (result[0].to(dtype), *result[1:])
    return result.to(dtype)
