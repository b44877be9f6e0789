"""Softmax attention over caches on a GPU, latents too; no call waits, graphs and compiled
calls take other lengths."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.common import rounded_keys
from slipstream.kernels.attention.latent import eager_latent_attention, latent_attention
from slipstream.layers.mla import MLA
from slipstream.ops.attention import attention
from slipstream.ops.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from slipstream.ops.rotary import rotary_tables
from tests.gpu.waiting import graph_of, waiting_is_an_error
from tests.support.operators import relative_error

# ---- Attention on a GPU: no host sync, no recompilation, graphs that follow new lengths, same
# bits. Every feature of attention, forward and backward, and caches that grow, in rows and in
# pages.


T, H, HKV = 300, 4, 2
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window_size": (40, 0)},
    "window, softcap": {"causal": False, "window_size": (130, 20), "softcap": 5.0},
    "packed": {"cu_seqlens": (0, 5, 5, 180, 300)},
    "packed, window": {"cu_seqlens": (0, 5, 5, 180, 300), "window_size": (60, 9), "causal": False},
    "packed apart": {"cu_seqlens": (0, 5, 5, 180, 300), "cu_seqlens_k": (0, 0, 7, 200, 300)},
    "used": {"key_lengths": (300, 7)},
    "sinks": {"sinks": True},
    "gate": {"g": True},
    "slopes": {"alibi_slopes": True},
}
# offsets that replace those of a feature, with the same end
OTHERS = {
    "cu_seqlens": ((0, 100, 101, 101, 300), (0, 0, 0, 300, 300)),
    "cu_seqlens_k": ((0, 90, 95, 150, 300), (0, 0, 8, 299, 300)),
    "key_lengths": ((0, 299), (150, 300)),
}
WIDTHS = [(64, 64), (256, 256), (192, 128), (512, 512)]
every_feature = pytest.mark.parametrize("name", FEATURES)
every_width = pytest.mark.parametrize(("D", "DV"), WIDTHS)


def call_of(name: str, D: int, DV: int, tokens: int = T) -> tuple[dict[str, Any], list[Tensor]]:
    """The arguments, and the leaves of the graph among them."""
    options = dict(FEATURES[name])
    B = 1 if "cu_seqlens" in options else 2
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    shapes = {"q": (H, D), "k": (HKV, D), "v": (HKV, DV)}
    args = {n: torch.randn(B, tokens, *x, **make).requires_grad_() for n, x in shapes.items()}
    for n in OTHERS:
        if n in options:
            given = torch.tensor(options[n], device="cuda", dtype=torch.int32)
            options[n] = (given * tokens // T).int()
    if "sinks" in options:
        args["sinks"] = torch.randn(H, device="cuda").requires_grad_()
    if "g" in options:
        args["g"] = (-torch.rand(B, tokens, H, device="cuda")).requires_grad_()
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(H, device="cuda")
    return {**options, **args}, list(args.values())


def both(call: Callable[..., Any], args: dict[str, Any], leaves: list[Tensor]) -> list[Tensor]:
    """o, lse and the gradients through both."""
    o, lse = call(**args, return_lse=True)
    seen = torch.where(lse.isfinite(), lse, 0.0)
    grads = torch.autograd.grad([o, seen], leaves, [torch.ones_like(o), torch.ones_like(lse)])
    return [o.detach(), lse.detach(), *grads]


def without_sync(run: Callable[[], Any]) -> None:
    run()  # what is loaded or compiled at first use may wait
    with waiting_is_an_error():
        for _ in range(3):  # worked out, recorded, played
            run()


@every_width
@every_feature
def test_attention_does_not_sync_and_repeats_its_bits(name: str, D: int, DV: int) -> None:
    args, leaves = call_of(name, D, DV)
    without_sync(lambda: both(attention, args, leaves))
    first, second = (both(attention, args, leaves) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@every_width
@pytest.mark.parametrize("name", [n for n, x in FEATURES.items() if OTHERS.keys() & x])
def test_attention_in_a_graph_follows_new_lengths(name: str, D: int, DV: int) -> None:
    args, leaves = call_of(name, D, DV)

    def run() -> list[Tensor]:
        return both(attention, args, leaves)

    graph, captured = graph_of(run)
    for turn in range(2):
        for n in OTHERS.keys() & args:
            args[n].copy_(torch.tensor(OTHERS[n][turn]))
        graph.replay()
        replayed = [x.clone() for x in captured]
        torch.testing.assert_close(replayed, run(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "D", "backend"),
    [*((x, 64, "aot_eager") for x in FEATURES), ("packed, window", 128, "inductor")],
)
def test_attention_compiles_fullgraph_without_recompiling(name: str, D: int, backend: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=backend)
    for i, tokens in enumerate((T, 450, 210)):
        args, leaves = call_of(name, D, D, tokens)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = both(compiled, args, leaves)
        torch.testing.assert_close(got, both(attention, args, leaves), rtol=0, atol=0)


def flash_calls() -> dict[str, tuple[Callable[[], Any], Any]]:
    """flash_attn's functions, and their leaves."""
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    cu = torch.tensor([0, 5, 5, 180, 300], device="cuda", dtype=torch.int32)
    batch = [torch.randn(2, T, h, 64, **make).requires_grad_() for h in (H, HKV, HKV)]
    rows, keys, values = batch
    packed = [torch.randn(T, h, 64, **make).requires_grad_() for h in (H, HKV, HKV)]
    q, k, v = packed
    k_pages, v_pages = (torch.randn(40, 16, HKV, 64, **make) for _ in range(2))
    table = torch.randperm(40, device="cuda").view(4, 10).int()
    at = torch.tensor([0, 9, 20, 150, 300], device="cuda", dtype=torch.int32)
    return {
        "func": (
            lambda: flash_attn_func(rows, keys, values, causal=True, window_size=(50, 0)),
            batch,
        ),
        "varlen": (lambda: flash_attn_varlen_func(q, k, v, cu, cu, 175, 175, causal=True), packed),
        "paged": (
            lambda: flash_attn_varlen_func(q, k_pages, v_pages, cu, at, block_table=table),
            [q],
        ),
    }


@pytest.mark.parametrize("name", ["func", "varlen", "paged"])
def test_flash_attn_no_sync_same_bits(name: str) -> None:
    call, leaves = flash_calls()[name]

    def run() -> list[Tensor]:
        o = call()
        return [o, *torch.autograd.grad(o.float().sum(), leaves)]

    without_sync(run)
    assert all(torch.equal(x, y) for x, y in zip(run(), run(), strict=True))


# a cache: rows of their own, or pages of so many keys
CACHES = [(64, 0), (128, 0), (256, 0), (128, 16), (64, 256), (80, 30), (512, 0), (512, 16)]
every_cache = pytest.mark.parametrize(("D", "page"), CACHES)
LENGTHS = ((477, 0, 130), (3, 470, 64), (200, 201, 202))


def cache_call(D: int, page: int, tokens: int = 1) -> dict[str, Any]:
    B, S = len(LENGTHS[0]), 480 if page != 256 else 512
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    rows = (B * S // page, page) if page else (B, S)
    cos, sin = (x.cuda() for x in rotary_tables(torch.arange(S), D // 2))
    call = {
        "q": torch.randn(B, tokens, 8, D, **make),
        "k_cache": torch.randn(*rows, HKV, D, **make),
        "v_cache": torch.randn(*rows, HKV, D, **make),
        "k": torch.randn(B, tokens, HKV, D, **make),
        "v": torch.randn(B, tokens, HKV, D, **make),
        "rotary_cos": cos,
        "rotary_sin": sin,
        "cache_seqlens": torch.tensor(LENGTHS[0], device="cuda", dtype=torch.int32),
        "causal": True,
        "return_softmax_lse": True,
    }
    if page:
        order = torch.randperm(rows[0], device="cuda")
        call["block_table"] = order.view(B, -1).int()
    return call


def grown(call: dict[str, Any]) -> list[Tensor]:
    """o, lse and the caches after the call, which leaves those of the arguments as they were."""
    caches = {n: call[n].clone() for n in ("k_cache", "v_cache")}
    return [*flash_attn_with_kvcache(**{**call, **caches}), *caches.values()]


@pytest.mark.parametrize("window", [(-1, -1), (100, 0)], ids=["all", "window"])
@every_cache
def test_cache_does_not_sync_and_repeats_its_bits(
    D: int, page: int, window: tuple[int, int]
) -> None:
    call = {**cache_call(D, page), "window_size": window}
    without_sync(lambda: flash_attn_with_kvcache(**call))
    assert all(torch.equal(x, y) for x, y in zip(grown(call), grown(call), strict=True))


@every_cache
def test_cache_in_a_graph_follows_new_lengths(D: int, page: int) -> None:
    call = cache_call(D, page)
    graph, captured = graph_of(lambda: flash_attn_with_kvcache(**call))
    for lengths in LENGTHS[1:]:
        call["cache_seqlens"].copy_(torch.tensor(lengths))
        for n in ("q", "k", "v"):
            call[n].normal_()
        want = grown(call)
        graph.replay()
        torch.testing.assert_close(
            (*captured, call["k_cache"], call["v_cache"]), want, rtol=0, atol=0
        )


@every_cache
def test_cache_compiles_fullgraph_without_recompiling(D: int, page: int) -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        flash_attn_with_kvcache, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for i, lengths in enumerate(LENGTHS):
        call = cache_call(D, page)
        call["cache_seqlens"].copy_(torch.tensor(lengths))
        want = grown(call)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = (*compiled(**call), call["k_cache"], call["v_cache"])
        torch.testing.assert_close(got, want, rtol=0, atol=0)


# ---- flash_attn_with_kvcache on a GPU beside itself on the CPU in float64: new keys, rotary,
# pages.


B, S, CACHE_HEADS = 3, 480, 2
CACHE_LENGTHS = (477, 0, 130)


def cache_of(D: int, DV: int, page: int) -> dict[str, Tensor]:
    """Rows of a cache, of which some are nobody's, or shuffled pages."""
    pages = S // page if page else 1
    rows = (B * pages, page) if page else (B + 1, S)
    k, v = (torch.randn(*rows, CACHE_HEADS, x).bfloat16() for x in (D, DV))
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
        "k": torch.randn(B, T, CACHE_HEADS, D).bfloat16(),
        "v": torch.randn(B, T, CACHE_HEADS, DV).bfloat16(),
        "rotary_cos": cos,
        "rotary_sin": sin,
        "cache_seqlens": torch.tensor(CACHE_LENGTHS, dtype=torch.int32),
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
@pytest.mark.parametrize("D", [32, 64, 128, 256, 512, 30])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
def test_cache_in_8_bits_is_read(dtype: torch.dtype, D: int, page: int, softcap: float) -> None:
    """As words of four channels, but for D of 30; beside float64 of the same rounded numbers."""
    cache = cache_of(D, D, page)
    scales, wide = {}, dict(cache)
    for name in ("k", "v"):
        codes, scale = rounded_keys.encode(cache[f"{name}_cache"].float(), dtype)
        cache[f"{name}_cache"], scales[f"{name}_scale"] = codes, scale
        wide[f"{name}_cache"] = rounded_keys.decode(codes, scale, torch.float64)
    q, lengths = torch.randn(B, 2, 8, D).bfloat16(), torch.tensor(CACHE_LENGTHS, dtype=torch.int32)
    options: dict[str, Any] = {"causal": True, "softcap": softcap}
    here = {n: x.cuda() for n, x in {**cache, **scales, "cache_seqlens": lengths}.items()}
    o: Any = flash_attn_with_kvcache(q.cuda(), **here, **options, impl="triton")
    want: Any = flash_attn_with_kvcache(q.double(), **wide, cache_seqlens=lengths, **options)
    torch.testing.assert_close(o.cpu().double(), want, rtol=2e-2, atol=2e-2)


# ---- Attention to a cache of latents, and the MLA layer, on a GPU beside float64 on the CPU.


# B, T, S, H, page, width, rest
CALLS = {
    "rows": (2, 1, 700, 16, 0, 512, 64),
    "rows, many heads": (3, 1, 1500, 128, 0, 512, 64),
    "rows, two tokens": (3, 2, 333, 7, 0, 512, 64),
    "pages of 64": (3, 1, 960, 128, 64, 512, 64),
    "pages of 16": (3, 3, 480, 16, 16, 512, 64),
    "pages of 30": (3, 1, 480, 128, 30, 512, 64),
    "narrow": (2, 2, 90, 5, 0, 100, 20),
}
every_call = pytest.mark.parametrize("name", CALLS)


def inputs(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int]:
    B, T, S, H, page, width, rest = CALLS[name]
    q = torch.randn(B, T, H, width + rest).bfloat16()
    table = torch.randperm(B * S // page).int().view(B, -1) if page else None
    latent = torch.randn(*((B * S // page, page) if page else (B, S)), width + rest).bfloat16()
    return q, latent, torch.tensor([S, T, 77][:B]), table, width


def on_gpu(name: str) -> tuple[Any, ...]:
    return tuple(x.cuda() if isinstance(x, Tensor) else x for x in inputs(name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@every_call
def test_latent_attention_matches_reference(name: str, dtype: torch.dtype) -> None:
    """Weights and results are rounded once each: 0.3 of eps together."""
    q, latent, lengths, table, width = on_gpu(name)
    q, latent = q.to(dtype), latent.to(dtype)
    options = {"width": width, "scale": 0.06, "table": table}
    first, second = (latent_attention(q, latent, lengths, **options, impl="triton") for _ in "ab")
    want, _ = eager_latent_attention(q.double(), latent.double(), lengths, table, width, 0.06)
    assert relative_error(first, want) <= 0.4 * torch.finfo(dtype).eps
    assert torch.equal(first, second)


@every_call
def test_latent_attention_in_cuda_graph(name: str) -> None:
    q, latent, lengths, table, width = on_gpu(name)

    def run() -> Tensor:
        return latent_attention(q, latent, lengths, width=width, scale=0.06, table=table)

    without_sync(run)
    graph, captured = graph_of(run)
    lengths.copy_(lengths.flip(0) // 2 + 1)
    graph.replay()
    assert torch.equal(captured, run())


@pytest.mark.parametrize("name", ["rows", "pages of 64"])
def test_latent_attention_compiles_without_recompiling(name: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(latent_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for i in range(3):
        q, latent, lengths, table, width = on_gpu(name)
        lengths -= 20 * i * (lengths > 100)
        options = {"width": width, "scale": 0.06, "table": table}
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = compiled(q, latent, lengths, **options)
        assert torch.equal(got, latent_attention(q, latent, lengths, **options))


def layer() -> tuple[MLA, MLA]:
    """On the CPU in float64, on the GPU in bfloat16, of the same weights."""
    made = MLA(256, num_heads=16, q_lora_rank=96).bfloat16()
    return copy.deepcopy(made).double(), made.cuda()


def test_mla_prefill_and_its_gradients_match_float64() -> None:
    wide, here = layer()
    x = torch.randn(2, 333, 256).bfloat16()
    do = torch.randn(2, 333, 256).bfloat16()
    found = []
    for model, device, dtype in ((wide, "cpu", torch.float64), (here, "cuda", torch.bfloat16)):
        leaves = [x.to(device, dtype).requires_grad_(), *model.parameters()]
        y, _ = model(leaves[0])
        found.append([y, *torch.autograd.grad(y, leaves, do.to(device, dtype))])
    for want, got in zip(*found, strict=True):
        assert relative_error(got.cpu(), want) <= 2e-2


@torch.no_grad()
def test_mla_decoding_absorbed_matches_float64() -> None:
    wide, here = layer()
    x = torch.randn(3, 140, 256).bfloat16()
    want, _ = wide(x.double())
    y, state = here(x[:, :137].cuda(), use_cache=True)
    found = [y]
    for t in range(137, 140):
        y, state = here(x[:, t : t + 1].cuda(), state=state, use_cache=True)
        found.append(y)
    assert relative_error(torch.cat(found, 1).cpu(), want) <= 2e-2
    assert relative_error(torch.cat(found[1:], 1).cpu(), want[:, 137:]) <= 2e-2
