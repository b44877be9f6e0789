"""The Triton kernels under Triton's interpreter, on a CPU, against the float64 reference; with
dropout the weights that plain torch keeps. bfloat16 products are wrong there: float32 and float16
only."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention import dropout
from slipstream.kernels.attention.cache import Cache, append, gather, hidden_keys
from slipstream.kernels.attention.eager import backward as eager_backward
from slipstream.kernels.attention.eager import forward as eager_forward
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.ops.attention import attention
from tests.support.attention_calls import CALLS, Call, check, got, incoming, want
from tests.support.interpreted import PARTS, interpreted
from tests.support.operators import with_grads

# calls of the default run: masks, groups, options and ways of packing, each once
SAMPLE = {"one", "causal", "more queries", "causal window", "gate, sinks", "slopes, sinks"}
SAMPLE |= {"packed apart", "packed, caches", "used", "few queries"}
WIDE = {"causal", "narrow window", "packed apart", "packed, caches", "few queries"}
NARROW = {"causal", "packed apart", "few queries"}


def check_call(index: int, dtype: torch.dtype) -> None:
    from slipstream.kernels.attention.triton import launch

    call = CALLS[index]
    terms = call.terms(dtype)
    do, dlse = incoming(terms)
    right = want(terms, call.options, do, dlse)
    limit = 5e-6 if dtype == torch.float32 else 4e-3
    check(got(launch, terms, call.options, do, dlse), right, limit, f"{call.name}, {dtype}")


def check_strides() -> None:
    """q, k and v as views of one projection, and one in another order."""
    from slipstream.kernels.attention.triton import launch

    qkv = torch.randn(1, 40, 6, 16)
    q, k = qkv[:, :, :4], qkv[:, :, 4:]
    v = torch.randn(1, 2, 40, 16).transpose(1, 2)
    terms, options = AttentionInputs(q, k, v), AttentionOptions(0.3, -1, 0)
    do, dlse = incoming(terms)
    right = want(terms, options, do, dlse)
    check(got(launch, terms, options, do, dlse), right, 5e-6, "strides")


def caches() -> dict[str, Cache]:
    q, pages = torch.randn(2, 3, 4, 16), torch.randn(9, 5, 2, 16)
    table = torch.tensor([[3, 1, 7, 0], [2, 8, 5, 4]], dtype=torch.int32)
    lengths = torch.tensor([18, 9], dtype=torch.int32)
    rows = torch.tensor([2, 0], dtype=torch.int32)
    cache = torch.randn(3, 70, 2, 16)
    wide, whole = torch.randn(9, 16, 2, 16), torch.tensor([[3, 1], [2, 8]])
    return {
        "pages": Cache(q, pages, pages + 1, lengths, table=table),
        "aligned pages": Cache(q, wide, wide + 1, lengths + 9, table=whole),
        "rows": Cache(q, cache, cache + 1, lengths, rows=rows, sinks=torch.randn(4)),
        "leftpad": Cache(q, cache, cache + 1, lengths, leftpad=rows + 3, slopes=torch.rand(2, 4)),
        "all": Cache(q, cache, cache + 1),
        # negative, and too large
        "missing pages": Cache(q, pages, pages + 1, lengths, table=table * 2 - 2),
        "missing aligned pages": Cache(q, wide, wide + 1, lengths + 9, table=whole * 3 - 3),
        "missing rows": Cache(q, cache, cache + 1, lengths, rows=rows - 1),
        "rows past the cache": Cache(q, cache, cache + 1, lengths, rows=rows * 2),
        "missing lengths": Cache(q, cache, cache + 1, lengths - 19, rows=rows),
        "negative padding": Cache(q, cache, cache + 1, lengths, leftpad=rows - 2),
    }


def surrounded(x: torch.Tensor) -> torch.Tensor:
    """x with as much memory before and behind it, which is part of what is compared."""
    around = torch.full((3 * x.shape[0], *x.shape[1:]), 7.0)
    around[x.shape[0] : 2 * x.shape[0]] = x
    return around


def check_caches(options: AttentionOptions) -> None:
    from slipstream.kernels.attention.triton import decode_launch

    for name, call in caches().items():
        o, lse = eager_forward(gather(call), options, hidden_keys(call))
        right = {"o": o.double(), "lse": lse.double()}
        found = dict(zip(right, decode_launch.decode(call, options)))
        check(found, right, 5e-6, f"{name}, {options}")
    for name, call in caches().items():
        if call.lengths is not None:
            k, v = torch.randn(2, 2, 2, 16), torch.randn(2, 2, 2, 16)
            places = (k, v, call.lengths, call.rows, call.table)
            mine, theirs = ((surrounded(call.k), surrounded(call.v)) for _ in range(2))
            n = call.k.shape[0]
            after = append(*(x[n : 2 * n] for x in theirs), *places)
            found = decode_launch.append(*(x[n : 2 * n] for x in mine), *places)
            assert torch.equal(found, after), name
            assert all(torch.equal(x, y) for x, y in zip(mine, theirs)), name
    # keys that are a part of their cache: each is read before its place is written
    cache, lengths = torch.randn(1, 9, 2, 16), torch.tensor([4])
    mine, theirs = cache.clone(), cache.clone()
    decode_launch.append(mine, mine + 1, mine[:, 3:7], mine[:, 3:7], lengths, None, None)
    append(theirs, theirs + 1, cache[:, 3:7], cache[:, 3:7], lengths, None, None)
    assert torch.equal(mine, theirs)


@interpreted
def test_decoding_of_large_scores_when_interpreted() -> None:
    """Of both signs: a softmax less anything but its largest score overflows, or has no sum."""
    from slipstream.kernels.attention.triton import decode_launch

    keys, values = torch.rand(2, 70, 2, 16) + 0.5, torch.randn(2, 70, 2, 16)
    for size in (30.0, -30.0):
        call, options = Cache(torch.full((2, 3, 4, 16), size), keys, values), AttentionOptions(0.3)
        right = dict(zip(("o", "lse"), eager_forward(gather(call), options, hidden_keys(call))))
        check(dict(zip(right, decode_launch.decode(call, options))), right, 5e-5, f"{size}")


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_kernels_match_reference_when_interpreted(part: str) -> None:
    warnings.simplefilter("error", RuntimeWarning)
    check_caches(AttentionOptions(-0.3, 6, 0, 3.0))
    if part == "further":
        check_caches(AttentionOptions(0.3, -1, 0))
        check_strides()
    for i, call in enumerate(CALLS):
        if (call.name in SAMPLE) == (part == "sample"):
            check_call(i, torch.float32)
        if call.name in NARROW and (call.name == "packed apart") == (part == "sample"):
            check_call(i, torch.float16)


# how many tiles of queries the workspace holds: all, or some of one pair
ROOMS = {"sample": (1 << 29, 1), "further": (1 << 29, 1 << 15)}


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_wide_gradients_match_reference_when_interpreted(part: str) -> None:
    from slipstream.kernels.attention.triton import launch, tiles, wide_launch

    for call in CALLS:
        if (call.name in WIDE) == (part == "sample") and "g" not in call.has:
            for dtype, limit in ((torch.float32, 2e-5), (torch.float16, 4e-3)):
                D, DV = (272, 264) if call.HKV == 1 else (40, 312)
                terms = Call(**{**vars(call), "D": D, "DV": DV, "scale": D**-0.5}).terms(dtype)
                options = AttentionOptions(D**-0.5, *call.options[1:])
                assert wide_launch.tile_for(terms) is not None
                do, dlse = incoming(terms)
                right = want(terms, options, do, dlse)
                for tiles.WORKSPACE_BYTES in ROOMS[part]:
                    found = got(launch, terms, options, do, dlse)
                    check(found, right, limit, f"{call.name}, {dtype}, {tiles.WORKSPACE_BYTES}")
    keep = torch.tensor([7])
    terms = Call("dropped", B=2, T=50, S=60, D=264, DV=264).terms()._replace(seed=keep)
    options = AttentionOptions(264**-0.5, -1, 0, 0.0, 0.3)
    do, dlse = incoming(terms)
    o, lse = eager_forward(terms, options)
    plain = eager_backward(terms, options, o, lse, do, dlse)
    found = launch.backward(terms, options, o, lse, do, dlse)
    check(found, {name: x.double() for name, x in plain.items()}, 2e-5, "dropped")


def check_delta(B: int, T: int, cu: list[int] | None, has_dlse: bool, BM: int) -> None:
    from slipstream.kernels.attention.triton.sums import launch_delta, launch_delta_of_tiles

    H, D = 3, 20
    o, do = torch.randn(B, T, H, D), torch.randn(B, T, H, D)
    lse, dlse = torch.randn(B, H, T), torch.randn(B, H, T) if has_dlse else None
    lse[:, 1, ::3] = float("-inf")  # queries that see no key
    want = [lse / torch.tensor(2.0).log(), (o * do).sum(-1).mT - (0 if dlse is None else dlse)]
    want[0] = torch.where(want[0].isneginf(), float("inf"), want[0])
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    tiles = -(-T // BM) if cu is None else T // BM + len(cu) - 1
    found = [torch.full((B, H, tiles * BM), float("nan")) for _ in range(2)]
    launch_delta_of_tiles(o, do, lse, dlse, *found, offsets, tiles, BM)
    for x, right, none in zip(found, want, (float("inf"), 0.0)):
        expected = torch.full_like(x, none)
        for n, (begin, end) in enumerate(zip(cu or [0], (cu or [0, T])[1:])):
            to = begin // BM * BM + n * BM
            expected[..., to : to + end - begin] = right[..., begin:end]
        torch.testing.assert_close(x, expected)
    found = [torch.full((B, H, -(-T // 4) * 4), float("nan")) for _ in range(2)]
    launch_delta(o, do, lse, dlse, *found)
    for x, right in zip(found, want):
        torch.testing.assert_close(x[..., :T], right)


@interpreted
def test_delta_of_queries_and_of_tiles() -> None:
    check_delta(2, 37, None, True, 16)
    check_delta(1, 50, [0, 5, 5, 31, 50], False, 16)
    check_delta(1, 33, [0, 33], True, 16)


# of q, k and v: batch, tokens, keys, heads, heads of keys, widths; and what is given beside them
CALLS_DROPOUT: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "causal": ((2, 70, 70, 4, 2, 16, 16), {}),
    "window": (
        (1, 150, 190, 2, 2, 8, 24),
        {"window_size": (20, 3), "causal": False, "softcap": 2.0},
    ),
    "packed": ((1, 90, 90, 2, 1, 16, 16), {"cu_seqlens": torch.tensor([0, 33, 33, 90])}),
    "lengths": (
        (2, 5, 40, 2, 2, 16, 16),
        {"key_lengths": torch.tensor([9, 40]), "sinks": torch.tensor([0.3, -0.2])},
    ),
    "gate": ((1, 40, 40, 2, 1, 16, 16), {"g": -torch.rand(1, 40, 2)}),
}


def inputs(sizes: tuple[int, ...]) -> dict[str, Tensor]:
    B, T, S, H, HKV, D, DV = sizes
    shapes = {"q": (B, T, H, D), "k": (B, S, HKV, D), "v": (B, S, HKV, DV)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def check_dropout(name: str) -> None:
    """Outputs and gradients are those of plain torch from the same seed, and again the same."""
    sizes, options = CALLS_DROPOUT[name]
    args = inputs(sizes) | {n: x for n, x in options.items() if n in ("g", "sinks")}
    rest = {n: x for n, x in options.items() if n not in args}

    def by(impl: str) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(11)
        return with_grads(
            lambda args: list(attention(**args, **rest, dropout_p=0.4, impl=impl, return_lse=True)),
            args,
        )

    found, wanted, again = by("triton"), by("eager"), by("triton")
    for x, y, z in zip(map(tuple, found), map(tuple, wanted), map(tuple, again)):
        for one, other, same in zip(x, y, z, strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-4, atol=2e-5, msg=lambda m: f"{name}: {m}"
            )
            assert torch.equal(one, same)


def weights(impl: str, p: float, T: int = 64) -> Tensor:
    """[heads, T, T]: with v = 1, an output is its weights."""
    q = torch.zeros(1, T, 2, 16)
    v = torch.eye(T)[None, :, None].expand(1, T, 2, T)
    torch.manual_seed(5)
    o = attention(q, q, v, dropout_p=p, causal=False, impl=impl)
    assert isinstance(o, Tensor)
    return o[0].transpose(0, 1)


def check_weights() -> None:
    for p in (0.25, 0.9):
        got, want = weights("triton", p), weights("eager", p)
        assert torch.equal(got == 0, want == 0)
        torch.testing.assert_close(got, want)
    assert not weights("triton", 1.0).any()


def test_words_are_philox() -> None:
    """Salmon et al.'s test vectors of Philox4x32-7: counter 0 and key 0, and all bits set."""
    zero, ones = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0xFFFFFFFF)
    want = {0: "5f6fb709 0d893f64 4f121f81 4f730a48", -1: "5207ddc2 45165e59 4d8ee751 8c52f662"}
    for seed, x in ((0, zero), (-1, ones)):
        words = dropout.philox(torch.tensor([seed]), x, x, x, x)
        assert " ".join(f"{int(word):08x}" for word in words) == want[seed]


@interpreted
def test_kernels_drop_what_plain_torch_drops() -> None:
    check_weights()
    for each in CALLS_DROPOUT:
        check_dropout(each)
