"""What functions of sizes choose, at every bound that they name and beside it.

Tiles, segments and numbers of programs are chosen for speed alone: no result tells. A digest of
each package's functions of numbers is here; whoever changes a choice on purpose writes the new one.
"""

import ast
import importlib
import inspect
import pkgutil
import random
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from zlib import crc32

import torch

from slipstream import kernels, layers, models
from tests.support import wants

pytestmark = wants.compiler

DTYPES = torch.float32, torch.bfloat16, torch.float64
SIZES = {*range(140)} | {x + y for x in (1 << n for n in range(8, 18)) for y in (-1, 0, 1)}
DRAWS = 9000


def of_numbers() -> Iterator[tuple[str, Callable, list[type]]]:
    """Functions whose arguments are all int, bool or dtypes."""
    for package in (kernels, layers, models):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(found.name)
            for outer in vars(module).values():
                f = inspect.unwrap(outer) if callable(outer) else None
                if not inspect.isfunction(f) or f.__module__ != module.__name__:
                    continue
                signature = inspect.signature(f)
                kinds = [
                    x.annotation for x in signature.parameters.values() if x.kind != x.VAR_KEYWORD
                ]
                # layouts are as a release of Triton writes them, and a device says what it has
                known = "Any" not in str(signature.return_annotation)
                known &= "backends" not in f.__code__.co_names
                if known and kinds and {*kinds} <= {int, bool, torch.dtype}:
                    yield found.name, f, kinds


def choices(f: Callable, kinds: list[type]) -> str:
    """Results at sizes drawn from the bounds that the function names, and others."""
    text = ast.parse(textwrap.dedent(inspect.getsource(f)))
    named: list[Any] = [x.value for x in ast.walk(text) if isinstance(x, ast.Constant)]
    named += [f.__globals__.get(x.id) for x in ast.walk(text) if isinstance(x, ast.Name)]
    bounds = {x for x in named if type(x) is int and 0 <= x < 1 << 20}
    sizes = sorted(SIZES | {max(x + y, 0) for x in bounds for y in (-1, 0, 1)})
    values: dict[type, Any] = {int: sizes, bool: (False, True), torch.dtype: DTYPES}
    draw, found = random.Random(0), list[str]()
    for _ in range(DRAWS):
        # the smallest, any, and numbers that others have to be a product or share of
        given = [draw.choice(values[x][: draw.choice((12, 150, None))]) for x in kinds]
        try:
            got = f(*given)
            found.append(repr([*islice(got, 9)] if isinstance(got, Iterator) else got))
        except Exception as e:
            found.append(type(e).__name__)
    return "".join(found)


DIGESTS: dict[str, int] = {
    "kernels.attention": 1940307464,
    "kernels.attnres": 3401434409,
    "kernels.elementwise": 2908841458,
    "kernels.linear": 2798911008,
    "kernels.loss": 2507525573,
    "kernels.matmul": 2878626054,
    "kernels.mixer_step": 1957589012,
    "kernels.norm": 2996537325,
    "kernels.primitives": 2636052252,
    "kernels.projection_step": 128916226,
    "kernels.selective_scan": 697346530,
    "kernels.time_mix": 2990125254,
    "layers.mamba": 1409409837,
    "models.block_steps": 208536686,
    "models.open_rows": 3448485210,
}


def test_choices_of_sizes() -> None:
    digests: dict[str, int] = defaultdict(int)
    for module, f, kinds in of_numbers():
        name = ".".join(module.split(".")[1:3])
        digests[name] ^= crc32(choices(f, kinds).encode())
    assert digests == DIGESTS
