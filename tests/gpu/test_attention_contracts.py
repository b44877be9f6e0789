"""Attention on a GPU: no host sync, no recompilation, graphs that follow new lengths, same bits.

Every feature of attention, forward and backward, and caches that grow, in rows and in pages.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.ops.attention import attention
from slipstream.ops.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from slipstream.ops.rotary import rotary_tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
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
WIDTHS = [(64, 64), (256, 256), (192, 128)]
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
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):  # worked out, recorded, played
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def graph_of(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    return graph, captured


@every_width
@every_feature
def test_attention_does_not_sync_and_repeats_its_bits(name: str, D: int, DV: int) -> None:
    args, leaves = call_of(name, D, DV)
    without_sync(lambda: both(attention, args, leaves))
    first, second = (both(attention, args, leaves) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)


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
        for x, y in zip(replayed, run(), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("D", [64])
@every_feature
def test_attention_compiles_fullgraph_without_recompiling(name: str, D: int) -> None:
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for i, tokens in enumerate((T, 450, 210)):
        args, leaves = call_of(name, D, D, tokens)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = both(compiled, args, leaves)
        for x, y in zip(got, both(attention, args, leaves), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_attention_compiles_by_inductor() -> None:
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True)
    for i, tokens in enumerate((T, 450)):
        args, leaves = call_of("packed, window", 128, 128, tokens)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = both(compiled, args, leaves)
        for x, y in zip(got, both(attention, args, leaves), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


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
CACHES = [(64, 0), (128, 0), (256, 0), (128, 16), (64, 256), (80, 30)]
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
        for x, y in zip((*captured, call["k_cache"], call["v_cache"]), want, strict=True):
            assert torch.equal(x, y)


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
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
