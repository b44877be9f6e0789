"""Functions of a peer that are others with some arguments given, renamed or in another order.

missing_names makes the error of a name that a peer has and Slipstream does not.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor


def missing_names(module: str, names: Collection[str]) -> Callable[[str], Any]:
    """The __getattr__ of a module under slipstream.compat.

        __getattr__ = missing_names(__name__, ("chunk_abc",))

    Args:
        module: its full name.
        names: what the peer's module has and this one has not. For these an ImportError says so,
            which `from module import name` raises as it is; hasattr() of any other name is False.
    """
    peer = module.removeprefix("slipstream.compat.")

    def getattr_of_module(name: str) -> Any:
        if name in names:
            raise ImportError(
                f"Slipstream has no {peer}.{name}; "
                f"slipstream.compat.uninstall({peer.partition('.')[0]!r}) goes back to the real "
                f"{peer.partition('.')[0]}",
                name=peer,
            )
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_of_module


NONE: Mapping[str, Any] = MappingProxyType({})


def fixed(
    function: Callable[..., Any],
    name: str,
    doc: str | None = None,
    /,
    *,
    order: str = "",
    renamed: Mapping[str, str] = NONE,
    added: Mapping[str, tuple[Any, Any]] = NONE,
    refused: Collection[str] = (),
    change: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    result: Callable[[Any], Any] | None = None,
    **given: Any,
) -> Callable[..., Any]:
    """`function` without the arguments given here; it is in the module that calls this.

    Args:
        name, doc: what it is called, and its docstring, function's own if None.
        order: its parameters, "q k v * sinks", with function's defaults; all in their order if "".
        renamed: its names of function's parameters.
        added: its parameters that function does not have, each with annotation and default. Those
            `refused` raise NotImplementedError if they ask for something; of the others nothing
            follows, unless `change` reads them.
        change: maps its arguments, by function's names, to those of the call.
        result: maps what function returns.
    """
    parameters = inspect.signature(function).parameters
    own = _signature(parameters, order, renamed, added, given)
    listed = own.parameters.values()
    names = [p.name for p in listed]
    positional = [p.name for p in listed if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [p.name for p in listed if p.default is p.empty]
    dropped = [] if change is not None else [x for x in added if x not in refused]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = dict(zip(positional, args)) | kwargs
        if (
            len(found) < len(args) + len(kwargs)
            or any(x not in found for x in required)
            or any(x not in names for x in kwargs)
        ):
            try:
                own.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name}() {error}") from None
        for key in refused:
            refuse(key, found.pop(key, None), added[key][1])
        for key in dropped:
            found.pop(key, None)
        for key in renamed:
            if key in found:
                found[renamed[key]] = found.pop(key)
        found = found if change is None else change(found)
        returned = function(**found, **given)
        return returned if result is None else result(returned)

    call.__name__ = call.__qualname__ = name
    call.__module__, call.__doc__ = sys._getframe(1).f_globals["__name__"], doc or function.__doc__
    call.__signature__ = own  # type: ignore[attr-defined]
    return call


def _signature(
    parameters: Mapping[str, inspect.Parameter],
    order: str,
    renamed: Mapping[str, str],
    added: Mapping[str, tuple[Any, Any]],
    given: Mapping[str, Any],
) -> inspect.Signature:
    if not order:
        left = [p for p in parameters.values() if p.name not in given]
        return inspect.Signature(left)
    found, kind = [], inspect.Parameter.POSITIONAL_OR_KEYWORD
    for name in order.split():
        if name == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
        elif name in added:
            annotation, default = added[name]
            found.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
        else:
            found.append(parameters[renamed.get(name, name)].replace(name=name, kind=kind))
    return inspect.Signature(found)


def refuse(name: str, value: Any, default: Any) -> None:
    """NotImplementedError for a value that asks for something, as its default does not."""
    if isinstance(value, Tensor):
        raise NotImplementedError(
            f"{name}: not implemented, got a tensor of shape {tuple(value.shape)}"
        )
    if value is not None and value != default:
        raise NotImplementedError(f"{name}: not implemented, got {value!r}")
