"""What functions of sizes choose, at every bound that they name and beside it.

Tiles, segments and numbers of programs are chosen for speed alone: no result tells. A digest of
each package's functions of numbers is here; whoever changes a choice on purpose writes the new one.
"""

import ast
import importlib
import inspect
import pkgutil
import random
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from zlib import crc32

import torch

from slipstream import kernels, layers, models
from slipstream.compiler.arch import named
from slipstream.kernels.matmul.config import Problem, choose
from tests.support import wants

pytestmark = wants.compiler

DTYPES = torch.float32, torch.bfloat16, torch.float64
SIZES = {*range(140)} | {x + y for x in (1 << n for n in range(8, 18)) for y in (-1, 0, 1)}
DRAWS = 5000


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


def tables() -> Iterator[tuple[str, str]]:
    """Tables of tiles and the like."""
    for found in pkgutil.walk_packages(kernels.__path__, "slipstream.kernels."):
        for name, x in vars(importlib.import_module(found.name)).items():
            if (
                name.isupper()
                and isinstance(x, dict | tuple)
                and re.search("warps=[^<]*$", repr(x))
            ):
                yield found.name, repr(x)


def products() -> str:
    """Configurations of matmul.config at its bounds, of each architecture."""
    draw, found = random.Random(0), list[str]()
    for arch in map(named, ("sm_80", "sm_86", "sm_90", "gfx942")):
        for _ in range(500):
            dtype = draw.choice((torch.bfloat16, torch.float32, torch.float8_e4m3fn))
            problem = Problem(dtype, torch.bfloat16, "tf32", swaps=draw.random() < 0.3)
            M, N, K = (draw.choice(sorted(SIZES)[1 : draw.choice((80, None))]) for _ in "MNK")
            found.append(repr(choose(problem, arch, M, N, K, draw.random() < 0.5)))
    return "".join(found)


DIGESTS: dict[str, int] = {
    "kernels.attention": 2472280964,
    "kernels.attnres": 3097749144,
    "kernels.conv": 2897563404,
    "kernels.elementwise": 1110047534,
    "kernels.gated_scan": 2427354428,
    "kernels.linear": 2604988070,
    "kernels.loss": 332573137,
    "kernels.matmul": 3130686395,
    "kernels.mixer_step": 2890409144,
    "kernels.norm": 2528305818,
    "kernels.primitives": 4161577613,
    "kernels.projection_step": 907517883,
    "kernels.selective_scan": 66710352,
    "kernels.time_mix": 225528278,
    "layers.mamba": 2615912835,
    "models.block_steps": 3887839670,
    "models.open_rows": 543878720,
}


def test_choices_of_sizes() -> None:
    digests: dict[str, int] = defaultdict(int)
    for module, f, kinds in of_numbers():
        name = ".".join(module.split(".")[1:3])
        digests[name] ^= crc32(choices(f, kinds).encode())
    for module, text in tables():
        digests[".".join(module.split(".")[1:3])] ^= crc32(text.encode())
    digests["kernels.matmul"] ^= crc32(products().encode())
    assert digests == DIGESTS
