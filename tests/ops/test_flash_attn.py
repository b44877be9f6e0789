"""flash_attn's names: what they return, packed and paged, caches that grow."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.common import rounded_keys
from slipstream.kernels.attention import op
from slipstream.kernels.attention.cache import Cache
from slipstream.ops.attention import attention
from slipstream.ops.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from slipstream.ops.rotary import rotary_embedding, rotary_tables

close = torch.testing.assert_close
PAGE = 3


def qkv(B: int = 2, T: int = 4, S: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, T, 4, 8), torch.randn(B, S, 2, 8), torch.randn(B, S, 2, 8)


def paged(x: Tensor) -> tuple[Tensor, Tensor]:
    """[B, S, ...] as shuffled pages and their table."""
    B, S = x.shape[:2]
    order = torch.randperm(B * S // PAGE)
    pages = x.reshape(B * S // PAGE, PAGE, *x.shape[2:])[order]
    return pages, order.argsort().view(B, S // PAGE).int()


def in_pages(k: Tensor, v: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """A page that nobody reads may have any number."""
    pages, table = paged(k)
    v_pages = v.reshape(-1, PAGE, *v.shape[2:])[table.flatten().long().argsort()]
    table[torch.arange(table.shape[1]) * PAGE >= lengths[:, None] + 2] = 99
    return {"k_cache": pages, "v_cache": v_pages, "block_table": table}


# names and defaults of flash_attn 2.8
OPTIONS = {"softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0}
REST = {"alibi_slopes": None, "deterministic": False, "return_attn_probs": False}
SIGNATURES: list[tuple[Callable, str, dict[str, Any]]] = [
    (flash_attn_func, "q k v", {"dropout_p": 0.0, **OPTIONS, **REST}),
    (
        flash_attn_varlen_func,
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
        {"dropout_p": 0.0, **OPTIONS, **REST, "block_table": None},
    ),
    (
        flash_attn_with_kvcache,
        "q k_cache v_cache",
        {
            **dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens")),
            **dict.fromkeys(("cache_batch_idx", "cache_leftpad", "block_table")),
            **OPTIONS,
            "rotary_interleaved": True,
            "alibi_slopes": None,
            "num_splits": 0,
            "return_softmax_lse": False,
        },
    ),
]


@pytest.mark.parametrize(("function", "wanted", "options"), SIGNATURES)
def test_signature_is_that_of_flash_attn(
    function: Callable, wanted: str, options: dict[str, Any]
) -> None:
    found = {
        x.name: x.default
        for x in inspect.signature(function).parameters.values()
        if x.kind is x.POSITIONAL_OR_KEYWORD
    }
    assert list(found) == [*wanted.split(), *options]
    assert {name: found[name] for name in options} == options


def test_flash_attn_func_is_attention_that_sees_all() -> None:
    q, k, v = qkv()
    close(flash_attn_func(q, k, v), attention(q, k, v, causal=False))
    slopes = torch.rand(4)
    o, lse, none = flash_attn_func(q, k, v, 0.0, 0.5, True, (5, 0), 3.0, slopes, False, True)
    want = attention(q, k, v, scale=0.5, window_size=(5, 0), softcap=3.0, alibi_slopes=slopes,
                     return_lse=True)  # fmt: skip
    close((o, lse), want)
    assert none is None


def test_flash_attn_varlen_func_is_each_sequence_alone() -> None:
    q, k, v = torch.randn(9, 4, 8), torch.randn(14, 2, 8), torch.randn(14, 2, 8)
    cu_q, cu_k = torch.tensor([0, 2, 2, 9]).int(), torch.tensor([0, 6, 7, 14]).int()
    o, lse, _ = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 7, 7, causal=True, return_attn_probs=True
    )
    for a, b, c, d in ((0, 2, 0, 6), (2, 9, 7, 14)):
        want = attention(q[None, a:b], k[None, c:d], v[None, c:d], return_lse=True)
        close((o[None, a:b], lse[None, :, a:b]), want)


def test_flash_attn_varlen_func_reads_pages() -> None:
    q, k, v = torch.randn(9, 4, 8), *qkv()[1:]
    (pages, table), values = paged(k), torch.empty(0)
    values = v.reshape(-1, PAGE, 2, 8)[table.flatten().long().argsort()]
    cu_q, cu_k = torch.tensor([0, 2, 9]).int(), torch.tensor([0, 8, 19]).int()
    o = flash_attn_varlen_func(q, pages, values, cu_q, cu_k, causal=True, block_table=table)
    for n, (a, b, S) in enumerate(((0, 2, 8), (2, 9, 11))):
        close(o[None, a:b], attention(q[None, a:b], k[n : n + 1, :S], v[n : n + 1, :S]))


@pytest.mark.parametrize("kind", ["rows", "pages", "leftpad"])
@pytest.mark.parametrize("window", [(-1, -1), (4, 0), (0, -1)], ids=["all", "window", "ahead"])
@pytest.mark.parametrize("causal", [True, False])
def test_cache_grows_and_is_read(kind: str, window: tuple[int, int], causal: bool) -> None:
    q, k, v = qkv(2, 2)
    new_k, new_v = torch.randn(2, 2, 2, 8), torch.randn(2, 2, 2, 8)
    lengths = torch.tensor([7, 3], dtype=torch.int32)
    cos, sin = rotary_tables(torch.arange(20), 6)
    given: dict[str, Any] = {"cache_seqlens": lengths, "window_size": window, "causal": causal}
    pad = torch.tensor([2, 0])
    if kind == "rows":
        rows = torch.tensor([1, 0])
        given |= {"k_cache": k.flip(0).clone(), "v_cache": v.flip(0).clone()}
        given |= {"cache_batch_idx": rows}
    elif kind == "pages":
        given |= in_pages(k, v, lengths)
    else:
        given |= {"k_cache": k.clone(), "v_cache": v.clone(), "cache_leftpad": pad}
    o, lse = flash_attn_with_kvcache(
        q, k=new_k, v=new_v, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False,
        return_softmax_lse=True, **given,
    )  # fmt: skip
    # without a limit all queries are turned as the first one
    step = torch.arange(2) * (causal or window != (-1, -1))
    again = flash_attn_with_kvcache(
        rotary_embedding(q, cos, sin, positions=lengths[:, None] + step),
        **{**given, "cache_seqlens": lengths + 2},
    )
    close(again, o)  # the new keys are in the cache
    for n, length in enumerate(lengths.tolist()):
        at = length + torch.arange(2)
        begin = int(pad[n]) if kind == "leftpad" else 0
        qn = rotary_embedding(q[n : n + 1], cos, sin, positions=length + step)
        kn = rotary_embedding(new_k[n : n + 1], cos, sin, positions=at)
        keys = torch.cat([k[n : n + 1, begin:length], kn], 1)
        values = torch.cat([v[n : n + 1, begin:length], new_v[n : n + 1]], 1)
        want = attention(qn, keys, values, causal=causal, window_size=window, return_lse=True)
        close((o[n : n + 1], lse[n : n + 1]), want)


@pytest.mark.parametrize("named", ["cache_batch_idx", "cache_seqlens", "block_table"])
@pytest.mark.parametrize("new", [0, 2])
def test_cache_of_a_missing_sequence_is_left_alone(named: str, new: int) -> None:
    """Servers fill batches up with -1: nothing is written for it, o is 0, the others are right."""
    q, k, v = qkv(2, 2)
    lengths, rows = torch.tensor([7, 3], dtype=torch.int32), torch.tensor([1, 0])
    given: dict[str, Any] = {"cache_seqlens": lengths, "causal": True, "return_softmax_lse": True}
    if named == "block_table":
        given |= in_pages(k, v, lengths)
    else:
        given |= {"k_cache": k, "v_cache": v, "cache_batch_idx": rows}
    if new:
        given |= {"k": torch.randn(2, new, 2, 8), "v": torch.randn(2, new, 2, 8)}

    def run(**other: Any) -> tuple[Any, Tensor, Tensor]:
        own = {name: given[name].clone() for name in ("k_cache", "v_cache")}
        out = flash_attn_with_kvcache(q, **{**given, **own, **other})
        return out, own["k_cache"], own["v_cache"]

    want, k_want, v_want = run()
    missing = given[named].clone()
    missing[1] = -1
    (o, lse), k_cache, v_cache = run(**{named: missing})
    close((o[:1], lse[:1]), (want[0][:1], want[1][:1]))
    assert not o[1].any() and (lse[1] == -torch.inf).all()
    # of the caches, the first sequence's rows or pages have changed as before, no other
    own = rows[:1]
    if named == "block_table":
        own = given["block_table"][0][given["block_table"][0] != 99].long()
    for name, got, full in (("k_cache", k_cache, k_want), ("v_cache", v_cache, v_want)):
        expected = given[name].clone()
        expected[own] = full[own]
        assert torch.equal(got, expected), name


@pytest.mark.parametrize("B", [1, 2])
def test_cache_takes_keys_that_are_a_part_of_it(B: int) -> None:
    """They are read as they were, before any is overwritten."""
    q, k, v = qkv(B, 4)
    want = k.clone()
    want[:, 4:8] = k[:, 3:7]
    flash_attn_with_kvcache(q, k, v, k[:, 3:7], v[:, 3:7], cache_seqlens=4)
    assert torch.equal(k, want)


@pytest.mark.parametrize("name", ["k", "v"])
def test_cache_is_left_alone_by_sparse_keys(name: str) -> None:
    q, k, v = qkv(2, 1)
    caches, new = (k.clone(), v.clone()), {"k": k[:, :1], "v": v[:, :1]}
    new[name] = new[name].to_sparse()
    with pytest.raises(TypeError, match=f"^{name}: want a dense tensor"):
        flash_attn_with_kvcache(q, *caches, **new, cache_seqlens=3)
    close(caches, (k, v))


def test_cache_calls_pass_opcheck_and_compile() -> None:
    q, k, v = qkv(2, 1)
    lengths = torch.tensor([7, 3])
    call = Cache(q, k, v, lengths, sinks=torch.randn(4))
    torch.library.opcheck(op.call_decode.overload, (*call, 0.3, -1, 0, 0.0, 0.0, "eager"))
    new = torch.randn(2, 1, 2, 8)
    torch.library.opcheck(op.append.overload, (k, v, new, new, lengths, None, None, "eager"))
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    caches = [(k.clone(), v.clone()) for _ in range(2)]
    want = flash_attn_with_kvcache(q, *caches[0], new, new, cache_seqlens=lengths)
    close(compiled(q, *caches[1], new, new, cache_seqlens=lengths), want)
    close(caches[0], caches[1])


@pytest.mark.parametrize("kind", ["rows", "pages", "batch_idx", "int8"])
@pytest.mark.parametrize(
    ("block", "tail", "G", "T"),
    [(1, False, 1, 2), (4, True, 1, 3), (16, False, 2, 1), (4, True, 4, 1)],
)
def test_selected_keys_of_a_cache(kind: str, block: int, tail: bool, G: int, T: int) -> None:
    q, k, v = qkv(3, T, 48)
    selected = torch.randint(-1, -(-48 // block), (3, T, G, 5)).int()
    selected[0, 0], sinks = -1, torch.randn(4)
    used = torch.tensor([13, 48 - T, 2], dtype=torch.int32)
    more: dict[str, Any] = {"selected": selected, "block": block, "tail": tail, "sinks": sinks}
    caches: dict[str, Any] = {"k_cache": k.clone(), "v_cache": v.clone()}
    bound = 1e-5
    if kind == "pages":
        (k_pages, table), v_pages = paged(k), v.reshape(-1, PAGE, 2, 8)
        v_pages = torch.empty_like(v_pages).index_copy(0, table.flatten().long(), v_pages)
        caches = {"k_cache": k_pages, "v_cache": v_pages, "block_table": table}
    elif kind == "batch_idx":
        rows = torch.tensor([2, 0, 1], dtype=torch.int32)
        caches = {n: x[rows.long().argsort()] for n, x in caches.items()}
        caches["cache_batch_idx"] = rows
    elif kind == "int8":
        (caches["k_cache"], more["k_scale"]), (caches["v_cache"], more["v_scale"]) = (
            rounded_keys.encode(x, torch.int8) for x in (k, v)
        )
        bound = 0.05
    new_k, new_v = torch.randn(3, T, 2, 8), torch.randn(3, T, 2, 8)
    new = {"k": new_k, "v": new_v, "cache_seqlens": used}
    o, lse = flash_attn_with_kvcache(
        q, **caches, **new, causal=True, return_softmax_lse=True, **more
    )
    for b, had in enumerate(used.tolist()):
        own = slice(b, b + 1)
        keys, values = (torch.cat([x[own, :had], y[own]], 1) for x, y in ((k, new_k), (v, new_v)))
        seen = selected[own].masked_fill(selected[own] > (had + T - 1) // block, -1)
        how = {"selected": seen, "block": block, "tail": tail, "sinks": sinks}
        want, lse_want = attention(q[own], keys, values, return_lse=True, **how)
        close(o[own], want, rtol=bound, atol=bound)
        close(lse[own], lse_want, rtol=bound, atol=bound)


def test_missing_pages_have_no_selected_keys() -> None:
    q, k, v = qkv(1, 1, 12)
    pages = k.reshape(4, PAGE, 2, 8), v.reshape(4, PAGE, 2, 8)
    selected = torch.tensor([1, 4, 7, 10], dtype=torch.int32).view(1, 1, 1, 4)
    table = torch.tensor([[0, -1, -1, -1]], dtype=torch.int32)
    now = torch.tensor([12], dtype=torch.int32)
    by: dict[str, Any] = {"cache_seqlens": now, "block_table": table}
    alone = flash_attn_with_kvcache(q, *pages, selected=selected[..., 1:], **by)
    assert not alone.any()
    whole = table.clone().copy_(torch.arange(4))
    o = flash_attn_with_kvcache(q, *pages, selected=selected, **by | {"block_table": whole})
    close(o, attention(q, k, v, selected=selected))
    assert not flash_attn_with_kvcache(q, *pages, selected=selected[..., :0], **by).any()
    with pytest.raises(ValueError, match="selected"):
        flash_attn_with_kvcache(q, *pages, selected=selected + 2, **by)


@pytest.mark.parametrize(
    ("given", "error", "named"),
    [
        ({"window_size": (3, 0)}, NotImplementedError, "window_size"),
        ({"alibi_slopes": torch.ones(4)}, NotImplementedError, "alibi_slopes"),
        ({"cache_leftpad": torch.zeros(2).int()}, NotImplementedError, "cache_leftpad"),
        ({"causal": False}, NotImplementedError, "causal"),
        ({"block": 3}, ValueError, "block"),
        ({"selected": None}, ValueError, "selected"),
        ({"selected": torch.zeros(2, 4, 3, 1).int()}, ValueError, "1, 2 or 4"),
        ({"selected": torch.zeros(2, 4, 1, 1).long()}, ValueError, "int32"),
    ],
)
def test_selected_keys_of_a_cache_reject_faults(
    given: dict[str, Any], error: type[Exception], named: str
) -> None:
    q, k, v = qkv()
    lists = torch.zeros(2, 4, 1, 1).int()
    options: dict[str, Any] = {"selected": lists, "causal": True, "block": 4}
    with pytest.raises(error, match=named):
        flash_attn_with_kvcache(q, k, v, **options | given)


def test_flash_attn_names_reject_faults_by_name() -> None:
    q, k, v = qkv()
    kv, flat = {"k_cache": k, "v_cache": v}, torch.randn(9, 4, 8)
    cu, table = torch.tensor([0, 9]), torch.zeros(2, 1).int()
    for call, error, word in [
        (lambda: flash_attn_func(q, k, v, dropout_p=1.1), ValueError, "dropout_p"),
        (lambda: flash_attn_varlen_func(q, k, v, cu, cu), ValueError, "q: want 3"),
        (lambda: flash_attn_varlen_func(flat, k, v, cu, cu), ValueError, "k: want 3"),
        (lambda: flash_attn_with_kvcache(q, **kv, k=k), ValueError, "k: wants v"),
        (lambda: flash_attn_with_kvcache(q, **kv, rotary_cos=q, rotary_sin=q), ValueError,
         "rotary_cos: wants k and v"),
        (lambda: flash_attn_with_kvcache(q, **kv, rotary_sin=q), ValueError, "rotary_cos, rotary"),
        (lambda: flash_attn_with_kvcache(q, **kv, k=k[:, :1], v=v[:, :1], cache_seqlens=1,
                                         rotary_cos=q[0, :, 0]), ValueError, "rotary_cos, rotary"),
        (lambda: flash_attn_with_kvcache(q, **kv, softcap=-1.0), ValueError, "softcap"),
        (lambda: flash_attn_with_kvcache(q, **kv, sinks=torch.ones(4).int()), TypeError, "sinks"),
        (lambda: flash_attn_with_kvcache(q, **kv, alibi_slopes=torch.ones(4).int()), TypeError,
         "alibi_slopes"),
        (lambda: flash_attn_func(*(x[..., :0] for x in (q, k, v))), ValueError, "q: want at least"),
        (lambda: flash_attn_with_kvcache(q, k[:1], v[:1]), ValueError, "k_cache: want at least"),
        (lambda: flash_attn_with_kvcache(q, **kv, block_table=table, cache_leftpad=cu), ValueError,
         "block_table"),
        (lambda: flash_attn_with_kvcache(q, **kv, cache_batch_idx=cu.float()), TypeError,
         "cache_batch_idx"),
        (lambda: flash_attn_with_kvcache(q, **kv, k=k, v=v, cache_seqlens=9), ValueError,
         "cache_seqlens"),
    ]:  # fmt: skip
        with pytest.raises(error, match=word):
            call()


def test_window_may_be_a_tensor() -> None:
    """As in flash_attn's own tests."""
    q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    for run in (
        lambda window: flash_attn_func(q, k, v, window_size=window),
        lambda window: flash_attn_varlen_func(
            q[0], k[0], v[0], offsets, offsets, 5, 5, window_size=window
        ),
        lambda window: flash_attn_with_kvcache(q, k, v, window_size=window),
    ):
        assert torch.equal(run(torch.tensor([2, 1])), run((2, 1)))
    with pytest.raises(TypeError, match="window_size: want a tuple"):
        flash_attn_func(q, k, v, window_size=torch.tensor([2.0, 1.0]))
    with pytest.raises(TypeError, match="window_size: want a tuple"):
        flash_attn_func(q, k, v, window_size=torch.tensor([2, 1, 0]))


class OwnCache(torch.nn.Module):
    """Attention to keys and values that it holds."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        super().__init__()
        self.register_buffer("k", k.clone())
        self.register_buffer("v", v.clone())

    def forward(self, q: Tensor, new: Tensor, lengths: Tensor) -> Tensor:
        return flash_attn_with_kvcache(q, self.k, self.v, new, new, cache_seqlens=lengths)


@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")
def test_exported_cache_calls_write_into_buffers() -> None:
    q, k, v = qkv(2, 1)
    new, lengths, eager = torch.randn(2, 1, 2, 8), torch.tensor([7, 3]), OwnCache(k, v)
    exported = torch.export.export(OwnCache(k, v), (q, new, lengths)).run_decompositions()
    assert {*exported.graph_signature.buffers_to_mutate.values()} == {"k", "v"}
    module: Any = exported.module()
    close(module(q, new, lengths), eager(q, new, lengths))
    close((module.k, module.v), (eager.k, eager.v))
    assert not torch.equal(module.k, k)
