"""flash_attn_with_kvcache on a GPU beside itself on the CPU in float64: new keys, rotary, pages."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.common import rounded_keys
from slipstream.ops.flash_attn import flash_attn_with_kvcache
from slipstream.ops.rotary import rotary_tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
B, S, HKV = 3, 480, 2
LENGTHS = (477, 0, 130)


def cache_of(D: int, DV: int, page: int) -> dict[str, Tensor]:
    """Rows of a cache, of which some are nobody's, or shuffled pages."""
    pages = S // page if page else 1
    rows = (B * pages, page) if page else (B + 1, S)
    k, v = (torch.randn(*rows, HKV, x).bfloat16() for x in (D, DV))
    if not page:
        return {"k_cache": k, "v_cache": v, "cache_batch_idx": torch.tensor([2, 0, 3])}
    return {"k_cache": k, "v_cache": v, "block_table": torch.randperm(B * pages).view(B, pages)}


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("window", [(-1, -1), (100, 0)], ids=["all", "window"])
@pytest.mark.parametrize(("T", "page"), [(1, 0), (3, 16), (1, 96), (2, 30)])
@pytest.mark.parametrize(("D", "DV"), [(64, 64), (128, 128), (80, 80), (192, 128)])
def test_cache_grows_and_is_read(
    D: int, DV: int, T: int, page: int, window: tuple[int, int], interleaved: bool
) -> None:
    cos, sin = rotary_tables(torch.arange(S), D // 2)
    given: dict[str, Any] = {
        "q": torch.randn(B, T, 8, D).bfloat16(),
        "k": torch.randn(B, T, HKV, D).bfloat16(),
        "v": torch.randn(B, T, HKV, DV).bfloat16(),
        "rotary_cos": cos,
        "rotary_sin": sin,
        "cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32),
        "sinks": torch.randn(8),
        **cache_of(D, DV, page),
    }
    here = {n: x.cuda() for n, x in given.items()}
    wide = {n: x.double() if x.is_floating_point() else x for n, x in given.items()}
    options: dict[str, Any] = {
        "causal": True, "window_size": window, "rotary_interleaved": interleaved,
        "return_softmax_lse": True,
    }  # fmt: skip
    o, lse = flash_attn_with_kvcache(**here, **options, impl="triton")
    want, want_lse = flash_attn_with_kvcache(**wide, **options)
    torch.testing.assert_close(o.cpu().double(), want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=2e-2, atol=2e-2)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(here[name].cpu().double(), wide[name], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("softcap", [0.0, 3.0], ids=["plain", "cap"])
@pytest.mark.parametrize("page", [0, 16, 96])
@pytest.mark.parametrize("D", [32, 64, 128, 256, 30])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
def test_cache_in_8_bits_is_read(dtype: torch.dtype, D: int, page: int, softcap: float) -> None:
    """As words of four channels, but for D of 30; beside float64 of the same rounded numbers."""
    cache = cache_of(D, D, page)
    scales, wide = {}, dict(cache)
    for name in ("k", "v"):
        codes, scale = rounded_keys.encode(cache[f"{name}_cache"].float(), dtype)
        cache[f"{name}_cache"], scales[f"{name}_scale"] = codes, scale
        wide[f"{name}_cache"] = rounded_keys.decode(codes, scale, torch.float64)
    q, lengths = torch.randn(B, 2, 8, D).bfloat16(), torch.tensor(LENGTHS, dtype=torch.int32)
    options: dict[str, Any] = {"causal": True, "softcap": softcap}
    here = {n: x.cuda() for n, x in {**cache, **scales, "cache_seqlens": lengths}.items()}
    o: Any = flash_attn_with_kvcache(q.cuda(), **here, **options, impl="triton")
    want: Any = flash_attn_with_kvcache(q.double(), **wide, cache_seqlens=lengths, **options)
    torch.testing.assert_close(o.cpu().double(), want, rtol=2e-2, atol=2e-2)
