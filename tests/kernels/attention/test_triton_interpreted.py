"""The Triton kernels under Triton's interpreter, on a CPU, against the float64 reference.

bfloat16 products are wrong in the interpreter: float32 and float16 only.
"""

import warnings

import pytest
import torch

from slipstream.kernels.attention.cache import Cache, append, gather, hidden_keys
from slipstream.kernels.attention.eager import forward as eager_forward
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from tests.support.attention_calls import CALLS, check, got, incoming, want
from tests.support.interpreted import PARTS, interpreted

# calls of the default run: masks, groups, options and ways of packing, each once
SAMPLE = {"one", "causal", "more queries", "causal window", "gate, sinks", "slopes, sinks"}
SAMPLE |= {"packed apart", "packed, caches", "used", "few queries"}
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
