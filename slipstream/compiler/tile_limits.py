"""The matrix instruction of a product; the nearest tile that an architecture can run."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from slipstream.compiler.arch import Arch

T = TypeVar("T")


def instruction(arch: Arch, rows: int, warps: int) -> str | None:
    """The matrix instruction of a product with so many rows, None: plain arithmetic."""
    if arch.matrix is None or (rows >= arch.matrix.rows and warps % arch.matrix.warps == 0):
        return arch.instruction
    return "mma.sync"


def closest_legal(
    tile: Any,
    changed: Callable[..., T],
    reason_of: Callable[[T], str | None],
    sizes: Mapping[str, Sequence[Any]],
) -> T | None:
    """The tile that works with the fewest halvings and doublings of its sizes.

    Args:
        changed: takes the tile and new values of fields.
        sizes: by field, the values it may have; of what is no number another one is four steps.
    """
    best, min_steps = None, math.inf
    for values in itertools.product(*sizes.values()):
        named = dict(zip(sizes, values))
        away = sum(_steps(getattr(tile, name), x) for name, x in named.items())
        if away < min_steps and reason_of(near := changed(tile, **named)) is None:
            best, min_steps = near, away
    return best


def way_out(near: object) -> str:
    return "there is none that works" if near is None else f"the nearest that works is {near}"


def _steps(a: object, b: object) -> float:
    if isinstance(b, bool) or not isinstance(b, int):
        return 4 * (a != b)
    return abs(math.log2(max(a if isinstance(a, int) else 1, 1) / b))
