"""Softmax attention beside torch's kernels, and FlashAttention-4's (flash-attn-4) where installed.

    python bench/attention.py            shapes beside cuDNN and flash, packed lengths, caches
    python bench/attention.py --only ' causal'        of shapes: "4,4096,16,128 causal"
    python bench/attention.py --only packed|cache|latent
    python bench/attention.py --errors   of outputs and gradients, against float64

Shapes are B,T,H,D; TFLOP/s of the products, a causal mask counted as half of them, backward as 2.5
times the forward. packed: causal sequences of mixed lengths beside the same work in equal ones.
cache: one new token against a cache (B,S,H/HKV,D and the size of a page); latent: against the
latents of MLA with absorbed projections (512 + 64 wide, B,S,H). Both from a CUDA graph.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from harness import (
    BF16,
    DEVICE,
    Call,
    Measurement,
    Provider,
    Report,
    bandwidth,
    error,
    float64_errors,
    graph_ms,
    parser,
    sdpa,
)
from torch import Tensor
from torch.nn.attention import SDPBackend

from slipstream import ops
from slipstream.tools.catalog import Shape, chosen

# B, T, H, D, causal
SIZES = [(4, 4096, 16, 128), (2, 16384, 16, 128), (4, 4096, 32, 64), (2, 8192, 8, 256)]
SIZES += [(4, 4096, 16, 512)]
SHAPES = [(*size, causal) for size in SIZES for causal in (True, False)]
MIXED = (4096, 512, 2048, 1, 3000, 130, 5000, 1597)
# B, S, H, HKV, D, page size or 0
CACHES = [
    (16, 16384, 32, 8, 128, 0),
    (1, 131072, 32, 8, 128, 0),
    (64, 4096, 32, 8, 128, 16),
    (64, 4096, 32, 8, 128, 256),
    (16, 8192, 16, 16, 128, 0),
    (16, 16384, 64, 8, 64, 0),
    (16, 8192, 16, 2, 512, 0),
    (16, 8192, 16, 2, 512, 64),
]
# B, S, H, page size or 0
LATENT = [(32, 8192, 128, 0), (64, 8192, 16, 0), (128, 4096, 16, 64), (1, 131072, 128, 0)]
RANK, ROPE = 512, 64


def providers(causal: bool, D: int) -> dict[str, Callable[..., Tensor]]:
    """By name. On a CPU ours is what it is there, under its kernels' names. sm90: of
    heads wider than 256 what is chosen, its forward and portable gradients."""
    found: dict[str, Callable[..., Tensor]] = {}
    for name, impl in (("sm90", "sm90" if D <= 256 else None), ("portable", "triton")):
        found[name] = partial(
            ops.attention, causal=causal, impl=impl if DEVICE.type == "cuda" else None
        )
    found["cudnn"] = sdpa(causal, SDPBackend.CUDNN_ATTENTION)
    found["flash"] = sdpa(causal, SDPBackend.FLASH_ATTENTION)
    if D > 256:  # which the others refuse
        found["efficient"] = sdpa(causal, SDPBackend.EFFICIENT_ATTENTION)
    elif (fa4 := flash_attention_4()) is not None:
        found["fa4"] = lambda q, k, v: fa4(q, k, v, causal=causal)[0]
    return found


@cache
def flash_attention_4() -> Callable[..., tuple[Tensor, ...]] | None:
    """Its function, which returns the output and log-sum-exps, or None."""
    try:
        return importlib.import_module("flash_attn.cute").flash_attn_func
    except ImportError as e:
        print(f"fa4 is left out: {e}")
        return None


def speeds(
    named: Mapping[str, Provider], flops: Mapping[str, float], report: Report
) -> dict[str, float]:
    """TFLOP/s of "NAME fwd" and "NAME bwd", all in turns."""
    calls: dict[str, Call] = {}
    for name, provider in named.items():
        calls |= {f"{name} fwd": provider.forward, f"{name} bwd": provider.backward()}
    times = report.times(calls, 12)
    work = {way: {"fwd": 1.0, "bwd": 2.5}[way.split()[-1]] for way in times}
    return {way: work[way] * flops[way.split()[0]] / ms / 1e9 for way, ms in times.items()}


def name_of(B: int, T: int, H: int, D: int, causal: bool) -> str:
    return f"{B},{T},{H},{D} {'causal' if causal else 'full'}"


def able(B: int, T: int, H: int, D: int, causal: bool, report: Report) -> dict[str, Provider]:
    """The providers that take a shape."""
    args = chosen(["attention"])[0].inputs(report.shape(Shape(B=B, T=T, H=H, K=D, V=D)), DEVICE)
    named = {}
    for name, fn in providers(causal, D).items():
        provider = Provider(fn, args)
        try:
            provider.gradients()
        except (RuntimeError, NotImplementedError) as e:
            print(f"{name}: {str(e)[:150]}")
            continue
        named[name] = provider
    return named


def error_rows(
    B: int, T: int, H: int, D: int, causal: bool, report: Report
) -> Iterator[Mapping[str, object]]:
    """Errors of the first head of the first sequence."""
    exact = sdpa(causal, SDPBackend.MATH)
    for who, provider in able(B, T, H, D, causal, report).items():
        off = float64_errors(provider, exact, lambda x: x[:1, :, :1])
        yield {"work": f"attention {name_of(B, T, H, D, causal)}", "who": who, **off}


def shape_row(B: int, T: int, H: int, D: int, causal: bool, report: Report) -> dict[str, object]:
    row: dict[str, object] = {"shape": f"{B},{T},{H},{D}", "causal": causal}
    shape = report.shape(Shape(B=B, T=T, H=H, K=D, V=D))
    named = able(B, T, H, D, causal, report)
    flops = 4 * shape.B * shape.H * shape.T**2 * shape.K / (2 if causal else 1)
    found = speeds(named, dict.fromkeys(named, flops), report)
    row |= {name: round(x) for name, x in found.items()}
    for mine, other in (("sm90", "cudnn"), ("portable", "flash"), ("sm90", "fa4")):
        if found and {mine, other} <= set(named):
            row |= {
                f"{mine}/{other} {way}": round(found[f"{mine} {way}"] / found[f"{other} {way}"], 3)
                for way in ("fwd", "bwd")
            }
    if {"sm90", "cudnn"} <= set(named):
        off = error(named["sm90"].forward(), named["cudnn"].forward())
        row["differs"] = f"{off:.1e}"
    return row


def packed_row(D: int, report: Report) -> Mapping[str, object]:
    """The same work in sequences of mixed lengths and of one length."""
    side = round((sum(x * x for x in MIXED) / len(MIXED)) ** 0.5)
    named, flops = {}, {}
    for name, lengths in (("mixed", MIXED), ("equal", (side,) * len(MIXED))):
        shape = report.shape(Shape(H=16, K=D, V=D, lengths=lengths))
        args = chosen(["attention"])[0].inputs(shape, DEVICE)
        named[name] = Provider(partial(ops.attention, causal=True), args)
        flops[name] = 2 * shape.H * shape.K * sum(float(x) ** 2 for x in shape.lengths or ())
    found = speeds(named, flops, report)
    return {"shape": f"packed causal, 16, {D}"} | {name: round(x) for name, x in found.items()}


def cached(B: int, S: int, page: int, *rest: int) -> tuple[Tensor, Tensor | None]:
    """A cache of rows or of pages in a random order, and the table of its pages."""
    pages = B * -(-S // page) if page else 0
    table = torch.randperm(pages, device=DEVICE).int().view(B, -1) if page else None
    size = (pages, page, *rest) if page else (B, S, *rest)
    return torch.randn(size, device=DEVICE, dtype=BF16), table


def replayed(call: Call, report: Report, moved: float, flops: float = 0.0) -> dict[str, object]:
    """The bandwidth of a call from a CUDA graph."""
    call()
    if report.options.once:
        return {}
    ms = graph_ms(call, report.runs(20))
    return bandwidth(ms, moved) | ({"TFLOP/s": round(flops / ms / 1e9)} if flops else {})


def cache_row(
    B: int, S: int, H: int, HKV: int, D: int, page: int, report: Report
) -> dict[str, object]:
    row: dict[str, object] = {"shape": f"{B},{S},{H}/{HKV},{D}", "page": page}
    if report.options.small:
        B, S, H, HKV, page = 2, 64, 4, 2, min(page, 16)
    (k, table), q = cached(B, S, page, HKV, D), torch.randn(B, 1, H, D, device=DEVICE, dtype=BF16)
    lengths = torch.full((B,), S, device=DEVICE, dtype=torch.int32)
    options: dict[str, Any] = {"cache_seqlens": lengths, "block_table": table, "causal": True}
    call = partial(ops.flash_attn_with_kvcache, q, k, torch.randn_like(k), **options)
    return row | replayed(call, report, 2.0 * B * S * HKV * D * 2)


def latent_row(B: int, S: int, H: int, page: int, report: Report) -> dict[str, object]:
    row: dict[str, object] = {"shape": f"{B},{S},{H}", "page": page}
    if report.options.small:
        B, S, H, page = 2, 64, 4, min(page, 16)
    latent, table = cached(B, S, page, RANK + ROPE)
    q = torch.randn(B, 1, H, RANK + ROPE, device=DEVICE, dtype=BF16)
    lengths = torch.full((B,), S, device=DEVICE, dtype=torch.int32)
    call = partial(ops.latent_attention, q, latent, lengths, width=RANK, scale=0.05, table=table)
    flops = 2.0 * B * S * H * (2 * RANK + ROPE)
    return row | replayed(call, report, 2.0 * B * S * (RANK + ROPE), flops)


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--errors", action="store_true", help="against float64, no times")
    given = options.parse_args(argv)
    report = Report(given)
    works: list[Measurement] = []
    if given.errors:
        works = [(name_of(*x), "errors", partial(error_rows, *x, report)) for x in SHAPES]
    else:
        for size in SHAPES:
            works.append((name_of(*size), "attention_rows", partial(shape_row, *size, report)))
        for D in (64, 128):
            works.append((f"packed {D}", "attention_packed", partial(packed_row, D, report)))
        for x in CACHES:
            works.append((f"cache {x}", "attention_decode_gpu", partial(cache_row, *x, report)))
        for x in LATENT:
            works.append((f"latent {x}", "attention_latent", partial(latent_row, *x, report)))
    report.measure(works)


if __name__ == "__main__":
    main()
