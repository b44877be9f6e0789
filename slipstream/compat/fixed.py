"""Functions of a peer that are another one with some of its arguments given."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any


def fixed(
    function: Callable[..., Any], name: str, doc: str | None = None, **given: Any
) -> Callable[..., Any]:
    """`function` without the arguments given here; the others keep their order and defaults.

    It is in the module that calls this, under `name`, with function's own docstring if doc is None.
    """
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name not in given]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    own = signature.replace(parameters=parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(positional):
            raise TypeError(
                f"{name}() takes {len(positional)} positional arguments but {len(args)} were given"
            )
        try:
            return function(**dict(zip(positional, args)), **kwargs, **given)
        except TypeError:  # of arguments that do not fit it names the other function
            try:
                own.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name}() {error}") from None
            raise

    call.__name__ = call.__qualname__ = name
    call.__module__, call.__doc__ = sys._getframe(1).f_globals["__name__"], doc or function.__doc__
    call.__signature__ = own  # type: ignore[attr-defined]
    return call
