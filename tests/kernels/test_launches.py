"""What operators launch of calls of many sizes: kernels, grids, tiles, warps, stages and sizes; and
what functions of sizes choose, at every bound that they name and beside it.

Much of it is chosen for speed alone: no number tells. Digests of the launches of some operators,
and of each package's functions of numbers, are here: whoever changes a choice on purpose measures
it, and writes the new digest; who only gives a kernel other arguments writes it too.
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
from itertools import chain, islice, product
from typing import Any
from unittest import mock
from zlib import crc32

import pytest
import torch

from slipstream import kernels, layers, models
from slipstream.compiler.arch import named
from slipstream.kernels.matmul.config import Problem, choose
from slipstream.tools.backend_query import trace_operator
from slipstream.tools.catalog import SAMPLES, Shape
from slipstream.tools.samples import Sample
from tests.support import wants
from tests.support.scripts import script

pytestmark = wants.compiler

COMPILERS = {"triton": "3.6.0", "ptxas": "13.0.88"}
FP32 = torch.float32
# heads, their width, a layer's width, classes
WIDTHS = (2, 64, 128, 1000), (8, 128, 1024, 1 << 15), (16, 256, 4096, 70000), (64, 128, 8192, 50)
CALLS = (1, 1), (2, 16), (1, 64), (64, 1), (1, 1024), (2, 4096), (1, 1 << 16)
SHAPES = [
    Shape(B, T, H, K, K, D=H * K, C=C, Z=Z, state=True, M=min(T, 512))
    for (H, K, C, Z), (B, T) in product(WIDTHS, CALLS)
] + [
    Shape(B, T, 4, 64, 64, D=256, C=512, state=True, packed=packed, dtype=FP32)
    for B, T, packed in ((2, 1, False), (3, 200, True), (200, 10, True))
]
# whose tiles are others, and a row and packed sequences in float32
OTHERS, OF_OTHERS = ("sm_75", "sm_86", "sm_100", "gfx942"), [SHAPES[4], SHAPES[-2]]


def described(x: Any) -> Any:
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if isinstance(x, tuple | list):
        return [*map(described, x)]
    if hasattr(x, "block_shape"):
        return x.shape, x.strides, x.block_shape
    return str(getattr(x, "dtype", type(x).__name__))


def launches(op: str, samples: list[Sample] = SAMPLES) -> list[str]:
    """Of each launch the kernel, its grid, options and arguments; of tensors the dtypes."""
    from triton import JITFunction

    found: list[str] = []
    run, bound = JITFunction.run, set[tuple]()

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        values = [*map(described, (*args, *named.values()))]
        if kernel.__name__ != "scan_ids_kernel":  # has a number that the process gave a name
            found.append(f"{kernel.__name__}{grid} {values}")
        form = kernel, len(args), *named
        if form not in bound:  # that it takes what it is given; nothing is launched
            bound.add(form)
            run(kernel, *args, grid=grid, warmup=warmup, **named)

    with mock.patch.object(JITFunction, "run", note):
        # tests/kernels/linear/test_choices.py has what the linear family chooses at more shapes
        every = (3 if op.startswith("chunk_") else 1) if samples is SAMPLES else 6
        shapes = {"sm_90": SHAPES[::every], "sm_80": SHAPES[:: 3 * every]}
        for arch, some in (shapes | dict.fromkeys(OTHERS, OF_OTHERS)).items():
            for sample, shape in product([x for x in samples if x.op == op], some):
                trace_operator(sample, shape, arch, compilers=COMPILERS, impls=(None,))
    return [*dict.fromkeys(found)]


DIGESTS = {
    "attention flash_attn_with_kvcache latent_attention": 222322655,
    "attnres rotary_embedding": 3769369005,
    "mhc_pre mhc_post": 897301976,
    "index": 3342301806,
    "rms_norm rms_norm_gated layer_norm group_norm l2_norm": 2998257323,
    "short_convolution short_convolution_update": 1521534201,
    "mixer_step recurrent_step rwkv7_step token_mix_step": 1069302843,
    "projection_step matmul embedding": 207899880,
    "selective_scan token_shift": 3769702956,
    "swiglu geglu sigmoid_glu squared_relu glu_linear": 2627509073,
    "cross_entropy linear_cross_entropy linear_log_probs linear_kl_div": 2105608807,
    "chunk_linear_attn chunk_simple_gla chunk_retention chunk_lightning_attn": 1310965690,
    "chunk_gla chunk_rwkv6 chunk_gsa": 2497905607,
    "chunk_hgrn chunk_rwkv4 chunk_mamba3": 1814822592,
    "chunk_delta_rule chunk_gated_delta_rule chunk_comba chunk_gated_delta_product": 2864352035,
    "chunk_kda": 2501612795,
    "chunk_gdn2 chunk_dplr_delta_rule chunk_rwkv7": 2889172526,
}


@pytest.mark.parametrize("names", DIGESTS)
def test_launches_by_sizes(names: str) -> None:
    found = chain.from_iterable(map(launches, names.split()))
    assert crc32("".join(found).encode()) == DIGESTS[names]


def test_launches_of_layers_by_sizes() -> None:
    """Of what layers and engines ask operators for beside."""
    samples = script("tools/layer_samples").LAYER_SAMPLES
    found = chain.from_iterable(launches(x, samples) for x in sorted({x.op for x in samples}))
    assert crc32("".join(found).encode()) == 656428065


def test_every_operator_has_a_digest() -> None:
    by_token = {x.op for x in SAMPLES if x.op.startswith("fused_recurrent_")}  # launch as chunks do
    assert sorted(" ".join(DIGESTS).split()) == sorted({x.op for x in SAMPLES} - by_token)


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


CHOSEN: dict[str, int] = {
    "kernels.attention": 271198218,
    "kernels.indexer": 2262619751,
    "kernels.attnres": 3097749144,
    "kernels.conv": 2897563404,
    "kernels.elementwise": 3557748907,
    "kernels.gated_scan": 2427354428,
    "kernels.linear": 2604988070,
    "kernels.loss": 332573137,
    "kernels.matmul": 3130686395,
    "kernels.mixer_step": 163887309,
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
    assert digests == CHOSEN
