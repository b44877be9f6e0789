"""Checks of what a user wrote: names of keys, and the types of values."""

import types
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin


def expect_keys(prefix: str, values: Mapping[str, Any], known: Iterable[str]) -> None:
    """
    Raises:
        ValueError: a key that is not among the known ones; names the nearest of them.
    """
    known = list(known)
    for key in values:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            advice = (
                f"did you mean {prefix}{near[0]}?" if near else f"want one of {', '.join(known)}"
            )
            raise ValueError(f"{prefix}{key}: no such key; {advice}")


def checked(name: str, value: Any, hint: Any) -> Any:
    """The value as its type hint has it: an integer for a float is one, a list becomes the tuple, a
    single string the tuple of it.

    Raises:
        TypeError: a value of another type. ValueError: none of an enumeration's.
    """
    origin = get_origin(hint)
    if origin is tuple and isinstance(value, str):
        value = (value,)
    if not _fits(value, hint):
        raise TypeError(f"{name}: want {_in_words(hint)}, got {value!r}")
    for enum in (hint, *get_args(hint)):
        if isinstance(value, str) and isinstance(enum, type) and issubclass(enum, Enum):
            expect_value(name, value, [x.value for x in enum])
    return tuple(value) if origin is tuple else value


def expect_value(name: str, value: str, known: Iterable[str]) -> None:
    """
    Raises:
        ValueError: a value that is not among the known ones; names the nearest of them.
    """
    known = list(known)
    if value not in known:
        near = get_close_matches(value, known, n=1)
        advice = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name}: want one of {', '.join(known)}, got {value!r}{advice}")


def _fits(value: Any, hint: Any) -> bool:
    """Hints that this does not know fit."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, x) for x in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin in (tuple, list):
        inner = (get_args(hint) or (Any,))[0]
        return isinstance(value, list | tuple) and all(_fits(x, inner) for x in value)
    if origin is dict or hint is dict:
        return isinstance(value, dict)
    if hint is Any or not isinstance(hint, type):
        return True
    if issubclass(hint, Enum):
        return isinstance(value, str)
    if hint in (int, float):
        numbers = int if hint is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool)
    return isinstance(value, hint)


def _in_words(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_in_words(x) for x in get_args(hint)))
    if origin in (tuple, list):
        return f"a list of {_in_words((get_args(hint) or (Any,))[0])}"
    if origin is dict or hint is dict:
        return "a mapping"
    if hint in (None, type(None)):
        return "null"
    if isinstance(hint, type):
        return "str" if issubclass(hint, Enum) else hint.__name__
    return str(hint)
