"""A cache of keys and values in 8 bits: its error, and the kernel beside plain torch, interpreted
and compiled for GPUs that need not be there; what attention's kernels are not compiled for. The
calls are traced, so tiles and arguments are those of a real launch."""

from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.common import rounded_keys
from slipstream.compiler.arch import ARCHS
from slipstream.compiler.trace import trace
from slipstream.kernels.attention.cache import Cache
from slipstream.kernels.attention.inputs import AttentionOptions
from slipstream.ops import attention
from slipstream.ops import flash_attn_with_kvcache as attend
from tests.support import wants
from tests.support.interpreted import interpreted
from tests.support.operators import relative_error

DTYPES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
# of o, with normal keys and values: of one rounding of both
BARS = {"int8": 1e-2, "float8": 4e-2}
PAGE = 16


def caches(name: str, k: Tensor, v: Tensor) -> dict[str, Any]:
    (k, k_scale), (v, v_scale) = (rounded_keys.encode(x, DTYPES[name]) for x in (k, v))
    return {"k_cache": k, "v_cache": v, "k_scale": k_scale, "v_scale": v_scale}


def paged(given: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """The same in pages out of order."""
    B, S = given["k_cache"].shape[:2]
    count = S // PAGE
    table = torch.randperm(B * count, generator=torch.Generator().manual_seed(0)).view(B, count)
    pages = {}
    for name, x in given.items():
        rows = x.reshape(B * count, PAGE, *x.shape[2:])
        made = torch.empty_like(rows)
        made[table.flatten()] = rows
        pages[name] = made
    return pages, table.int()


def check(impl: str) -> None:
    """Rows, pages, padding and windows; with new keys that are rounded on the way in."""
    torch.manual_seed(0)
    B, S, H, HKV, D = 2, 48, 4, 2, 32
    q, new_k, new_v = torch.randn(B, 2, H, D), torch.randn(B, 2, HKV, D), torch.randn(B, 2, HKV, D)
    k, v = torch.randn(B, S, HKV, D), 0.1 * torch.randn(B, S, HKV, D)
    lengths = torch.tensor([9, 40], dtype=torch.int32)
    for name in DTYPES:
        given = caches(name, k, v)
        wide = {x: rounded_keys.decode(given[x], given[s], q.dtype) for x, s in SCALES.items()}
        pages, table = paged(given)
        ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "rows": (given, {}),
            "padded": (given, {"cache_leftpad": torch.tensor([3, 5], dtype=torch.int32)}),
            "window": (given, {"window_size": (7, 0)}),
            "pages": (pages, {"block_table": table}),
        }
        for way, (cache, options) in ways.items():
            options = {"cache_seqlens": lengths, "causal": True, **options}
            own = {x: y.clone() for x, y in cache.items()}
            o: Any = attend(q, **own, k=new_k, v=new_v, **options, impl=impl)
            # the new keys as they are in the cache now
            rounded = [rounded_keys.encode(x, DTYPES[name]) for x in (new_k, new_v)]
            news = [rounded_keys.decode(*x, q.dtype) for x in rounded]
            plain = {x: y for x, y in options.items() if x != "block_table"}
            copies = {x: y.clone() for x, y in wide.items()}
            want: Any = attend(q, **copies, k=news[0], v=news[1], **plain, impl="eager")
            assert relative_error(o, want) <= 1e-5, (name, way)


def check_narrow(impl: str) -> None:
    """Queries in 16 bits; float16 holds no product of a probability and these scales of values.
    Heads whose rows are whole words have a kernel of their own."""
    torch.manual_seed(0)
    B, S, H, HKV = 2, 70, 4, 2
    lengths = torch.tensor([9, 64], dtype=torch.int32)
    # not 30 wide in bfloat16: the interpreter makes no bfloat16 of an int8
    heads = (32, torch.float16), (32, torch.bfloat16), (30, torch.float16)
    for name, (D, dtype) in product(DTYPES, heads):
        q = torch.randn(B, 2, H, D).to(dtype)
        given = caches(name, torch.randn(B, S, HKV, D), 1e-3 * torch.randn(B, S, HKV, D))
        wide = {
            x: rounded_keys.decode(given[x], given[s], torch.float64) for x, s in SCALES.items()
        }
        for way, options in {
            "": {},
            "window": {"window_size": (7, 0)},
            "cap": {"softcap": 3.0},
        }.items():
            options = {"cache_seqlens": lengths, "causal": True, **options}
            o: Any = attend(q, **given, **options, impl=impl)
            want: Any = attend(q.double(), **wide, **options, impl="eager")
            assert relative_error(o, want) <= BARS_NARROW[dtype], (name, D, dtype, way)


BARS_NARROW = {torch.float16: 1e-3, torch.bfloat16: 6e-3}
SCALES = {"k_cache": "k_scale", "v_cache": "v_scale"}


def test_cache_in_8_bits() -> None:
    check("eager")
    check_narrow("eager")


@pytest.mark.parametrize("name", DTYPES)
def test_error_of_keys_in_8_bits(name: str) -> None:
    """The error of o beside float64's; it stays the same as keys come."""
    torch.manual_seed(0)
    for S in (64, 4096):
        q, k, v = (torch.randn(2, n, 2, 64, dtype=torch.float64) for n in (1, S, S))
        want = attention(q, k, v)
        lengths = torch.full((2,), S, dtype=torch.int32)
        got: Any = attend(q.float(), **caches(name, k, v), cache_seqlens=lengths, causal=True)
        assert relative_error(got, want) <= BARS[name]


def test_scales_that_do_not_fit_are_refused() -> None:
    q, k = torch.randn(1, 1, 2, 16), torch.randn(1, 8, 2, 16)
    given = caches("int8", k, k)
    for change, error, message in (
        ({"k_scale": None}, ValueError, "k_scale: want it beside"),
        ({"k_scale": given["k_scale"][:, :3]}, ValueError, "k_scale: want shape"),
        ({"v_scale": given["v_scale"].half()}, TypeError, "v_scale: want torch.float32"),
        ({"k_cache": k, "v_cache": k}, TypeError, "k_cache: want int8 or float8_e4m3fn"),
    ):
        with pytest.raises(error, match=message):
            attend(q, **{**given, **change}, cache_seqlens=4)


@interpreted
def test_cache_in_8_bits_when_interpreted() -> None:
    check("triton")
    check_narrow("triton")


@pytest.mark.parametrize(("D", "fill"), [(64, 4), (128, 2)])
def test_decoding_fills_multiprocessors(D: int, fill: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With four programs of narrow heads, two of others."""
    launch = pytest.importorskip("slipstream.kernels.attention.triton.decode_launch")
    tile = SimpleNamespace(decode=SimpleNamespace(BM=16, BN=16, warps=4))
    asked = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(launch.tiling, "tiles_for", lambda *_: (tile, D, D))
    monkeypatch.setattr(launch, "choose_splits", asked)
    q, cache = torch.empty(1, 1, 4, D), torch.empty(1, 32, 2, D)
    call: Any = SimpleNamespace(k_scale=None, capacity=32)
    given = type("Call", (), {**vars(call), "__getitem__": lambda _, at: (q, cache, cache)[at]})()
    with pytest.raises(InterruptedError):
        launch.decode(given, None)
    assert asked.call_args.args[1:] == (2, 32, 16, fill)


def rounded_call(D: int, dtype: torch.dtype, page: int) -> Any:
    def call(device: torch.device) -> None:
        from slipstream.kernels.attention.triton import decode_launch

        def make(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        table = make(2, 40, dtype=torch.int32) if page else None
        shape = (90, page, 2) if page else (2, 3000, 2)
        k, scale = make(*shape, D), make(*shape, dtype=torch.float32)
        q, lengths = make(2, 1, 8, D, dtype=torch.bfloat16), make(2, dtype=torch.int32)
        cache = Cache(q, k, k, lengths, table=table, k_scale=scale, v_scale=scale)
        decode_launch.decode(cache, AttentionOptions(0.1, -1, 0))

    return call


@wants.compiler
@pytest.mark.parametrize(
    ("arch", "D", "page"), [("sm_90", 64, 0), ("sm_90", 128, 128), ("sm_80", 128, 30)]
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_decoding_from_8_bits_compiles(arch: str, D: int, page: int, dtype: torch.dtype) -> None:
    """By few instructions a key: most of what was once converted by the compiler (decode.py)."""
    job, *_ = trace(rounded_call(D, dtype, page), arch, backward=False)
    got = job.compile()
    assert job.name == "softmax_decode_kernel"
    assert got.shared <= ARCHS[arch].shared and got.stack == 0
    assert got.instructions["mma.sync"] and not got.instructions["wgmma"]
    assert "cvt.rn.bf16" not in got.ptx  # nothing is converted by way of float32


@wants.compiler
@pytest.mark.parametrize(
    ("arch", "D", "page"),
    [("sm_80", 16, 0), ("sm_120", 32, 0), ("gfx942", 64, 0), ("gfx942", 62, 30)],
)
def test_decoding_of_other_shapes_compiles(arch: str, D: int, page: int) -> None:
    """From narrow heads a product takes a quarter of the channels, and at least 16; AMD's compiler
    reshapes no pointers."""
    job, *_ = trace(rounded_call(D, torch.int8, page), arch, backward=False)
    got = job.compile()
    assert job.name == "softmax_decode_kernel"
    assert got.shared <= ARCHS[arch].shared and got.stack <= 256
    assert arch == "gfx942" or got.instructions["mma.sync"]


def _attention(device: torch.device, D: int, dropout_p: float) -> torch.Tensor:
    q, k, v = (torch.empty(2, 200, 4, D, device=device, dtype=torch.bfloat16) for _ in range(3))
    return ops.attention(q, k, v, dropout_p=dropout_p)


@wants.compiler
def test_probability_is_nothing_that_kernels_are_compiled_for() -> None:
    keys = [
        {job.key for job in trace(partial(_attention, D=64, dropout_p=p), "sm_80")}
        for p in (0.1, 0.5, 0.9)
    ]
    assert keys[0] == keys[1] == keys[2]
