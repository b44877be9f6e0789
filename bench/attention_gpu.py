"""Softmax attention on a GPU: right at odd sizes, then how fast, beside torch's own kernels.

python bench/attention_gpu.py            # everything but the sweep
python bench/attention_gpu.py --check    # only the comparison with the float64 reference
python bench/attention_gpu.py --times    # only the times beside SDPA's flash and cuDNN backends
python bench/attention_gpu.py --decode   # only decoding from a cache
python bench/attention_gpu.py --sweep    # tiles of each kernel at the timed shapes
python bench/attention_gpu.py --candidates  # tiles that may go into the table: errors, then times
python bench/attention_gpu.py --impl sm90 --check --times --peer   # the sm_90 kernels
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from record import record
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from slipstream.kernels.attention.cache import Cache, gather
from slipstream.kernels.attention.inputs import DIFFERENTIABLE, AttentionInputs, AttentionOptions
from slipstream.kernels.attention.reference import softmax_reference
from slipstream.kernels.attention.triton import decode_launch, launch
from slipstream.ops.attention import attention

COPY_BYTES_PER_MS = 4.28e9  # device copy on an H200
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# of o and lse, of the gradients, of those of g and the sinks
LIMITS = {"bf16": (0.005, 0.008, 0.02), "fp16": (0.002, 0.003, 0.01), "fp32": (2e-5, 2e-5, 2e-4)}
PLAIN = {"B": 1, "T": 300, "S": 300, "H": 2, "HKV": 2, "D": 128, "DV": 128}
ODD: list[dict[str, Any]] = [
    {**PLAIN, "right": 0},
    {**PLAIN, "S": 1},
    {**PLAIN, "B": 2, "T": 333, "S": 517, "HKV": 1, "D": 64, "DV": 64, "right": 0},
    {**PLAIN, "T": 517, "S": 333, "D": 80, "DV": 96, "right": 0},
    {**PLAIN, "T": 700, "S": 700, "D": 192, "DV": 128, "left": 17, "right": 0},
    {**PLAIN, "T": 700, "S": 650, "D": 64, "DV": 256, "left": 300, "right": 150},
    {**PLAIN, "T": 385, "D": 256, "DV": 256, "right": 0, "softcap": 20.0},
    {**PLAIN, "D": 100, "DV": 33, "right": 0, "slopes": 1, "sinks": True},
    {**PLAIN, "B": 2, "H": 4, "HKV": 2, "T": 900, "S": 900, "D": 64, "DV": 64, "right": 0,
     "g": True},
    {**PLAIN, "T": 900, "S": 900, "lengths": (5, 0, 400, 1, 494), "right": 0, "g": True},
    {**PLAIN, "H": 6, "T": 900, "S": 700, "lengths": (5, 0, 400, 1, 494), "slopes": 2,
     "k_lengths": (0, 7, 500, 1, 192), "left": 100, "right": 30, "sinks": True},
    {**PLAIN, "B": 3, "H": 8, "T": 200, "S": 450, "used": (450, 9, 0), "right": 0, "g": True},
    {**PLAIN, "B": 3, "H": 16, "T": 2, "S": 2000, "used": (2000, 77, 0), "right": 0,
     "sinks": True, "softcap": 10.0, "slopes": 2},
]  # fmt: skip
# of ODD, where not all: each is a few seconds of compiling, float32 more
CASES = {"fp16": (0, 3, 10), "fp32": (2, 8, 12)}
# B, T, H, D, causal
SHAPES = [
    (4, 4096, 16, 128, True),
    (4, 4096, 16, 128, False),
    (2, 16384, 16, 128, True),
    (2, 16384, 16, 128, False),
    (4, 4096, 32, 64, True),
    (4, 4096, 32, 64, False),
    (2, 8192, 8, 256, True),
    (2, 8192, 8, 256, False),
]
# B, S, H, HKV, D, page size or 0
CACHES = [
    (16, 16384, 32, 8, 128, 0),
    (1, 131072, 32, 8, 128, 0),
    (64, 4096, 32, 8, 128, 16),
    (64, 4096, 32, 8, 128, 256),
    (16, 8192, 16, 16, 128, 0),
    (16, 16384, 64, 8, 64, 0),
]


def terms_of(size: dict[str, Any], dtype: torch.dtype) -> tuple[AttentionInputs, AttentionOptions]:
    B, T, S, H, HKV, D, DV = (size[n] for n in PLAIN)
    q_lengths = size.get("lengths")
    k_lengths = size.get("k_lengths", q_lengths)
    N = B if q_lengths is None else len(q_lengths)
    make: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    x = torch.rand(B, S, H, device="cuda")
    slopes = {0: None, 1: torch.rand(H, device="cuda"), 2: torch.rand(N, H, device="cuda")}
    cu_q, cu_k = (
        None if n is None else torch.tensor([0, *n], device="cuda").cumsum(0).int()
        for n in (q_lengths, k_lengths)
    )
    used = size.get("used")
    terms = AttentionInputs(
        torch.randn(B, T, H, D, **make),
        torch.randn(B, S, HKV, D, **make),
        torch.randn(B, S, HKV, DV, **make),
        g=torch.where(x < 0.01, -torch.inf, -0.05 * x) if size.get("g") else None,
        sinks=torch.randn(H, device="cuda") if size.get("sinks") else None,
        slopes=slopes[size.get("slopes", 0)],
        cu_q=cu_q,
        cu_k=cu_k,
        lengths=None if used is None else torch.tensor(used, device="cuda"),
    )
    left, right = size.get("left", -1), size.get("right", -1)
    return terms, AttentionOptions(D**-0.5, left, right, size.get("softcap", 0.0))


def oracle(
    terms: AttentionInputs, options: AttentionOptions, do: Tensor, dlse: Tensor
) -> dict[str, Tensor]:
    wide = {
        n: x.double().requires_grad_(n in DIFFERENTIABLE) if x.is_floating_point() else x
        for n, x in terms._asdict().items()
        if x is not None
    }
    o, lse = softmax_reference(AttentionInputs(**wide), options)
    loss = (o * do.double()).sum() + (torch.where(lse.isfinite(), lse, 0.0) * dlse.double()).sum()
    leaves = {n: wide[n] for n in DIFFERENTIABLE if n in wide}
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(leaves, grads))}


def error(got: Tensor, want: Tensor) -> float:
    """Root mean square, relative; nan where one is finite and the other is not."""
    finite = want.isfinite()
    if not torch.equal(finite, got.isfinite()):
        return float("nan")
    want, got = want[finite].double(), got[finite].double()
    if not want.numel():
        return 0.0
    size, off = (x.square().mean().sqrt().item() for x in (want, got - want))
    return off / size if size else off


def compare(size: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    terms, options = terms_of(size, dtype)
    B, T, H, _ = terms.q.shape
    do = torch.randn(B, T, H, terms.v.shape[-1], device="cuda", dtype=dtype)
    dlse = torch.randn(B, H, T, device="cuda")

    def run() -> dict[str, Tensor]:
        o, lse = launch.forward(terms, options)
        return {"o": o, "lse": lse, **launch.backward(terms, options, o, lse, do, dlse)}

    got, again = run(), run()
    same = all(torch.equal(got[n], again[n]) for n in got)
    want = oracle(terms, options, do, dlse)
    return {n: error(got[n], want[n]) if same else float("nan") for n in want}


def check() -> bool:
    """One line a dtype: the worst error of each result; nan if two runs differ."""
    fine = True
    for name, limits in LIMITS.items():
        worst: dict[str, tuple[float, int]] = {}
        start = time.perf_counter()
        for i, size in enumerate(ODD):
            if i not in CASES.get(name, range(len(ODD))):
                continue
            try:
                found = compare(size, DTYPES[name])
            except Exception as e:
                print(f"{name} case {i}: {type(e).__name__}: {str(e)[:300]}", flush=True)
                fine = False
                continue
            for n, e in found.items():
                limit = limits[{"o": 0, "lse": 0, "g": 2, "sinks": 2}.get(n, 1)]
                if not e <= limit:
                    print(f"  WRONG {name} case {i}: {n} {e:.1e} > {limit}", flush=True)
                    fine = False
                if not e <= worst.get(n, (-1.0, 0))[0]:
                    worst[n] = (e, i)
        line = ", ".join(f"{n} {e:.1e} (case {i})" for n, (e, i) in worst.items())
        print(f"{name}: {line}; {time.perf_counter() - start:.0f} s", flush=True)
    return check_caches() and fine


def cache_of(B: int, S: int, H: int, HKV: int, D: int, page: int) -> Cache:
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    pages = B * -(-S // page) if page else 0
    table = torch.randperm(pages, device="cuda").int().view(B, -1) if page else None
    shape = (pages, page, HKV, D) if page else (B, S, HKV, D)
    k, v = torch.randn(*shape, **make), torch.randn(*shape, **make)
    lengths = torch.full((B,), S, device="cuda", dtype=torch.int32)
    return Cache(torch.randn(B, 1, H, D, **make), k, v, lengths, table=table)


def check_caches() -> bool:
    worst = 0.0
    for page in (0, 128, 30):
        call = cache_of(3, 900, 8, 2, 128, page)
        call = call._replace(lengths=torch.tensor([900, 1, 333], device="cuda"))
        options = AttentionOptions(0.1, 600, 0)
        o, _ = softmax_reference(_wide(gather(call)), options)
        got, _ = decode_launch.decode(call, options)
        worst = max(worst, error(got, o))
    print(f"caches: o {worst:.1e}")
    return worst <= LIMITS["bf16"][0]


def _wide(terms: AttentionInputs) -> AttentionInputs:
    return terms._replace(q=terms.q.double(), k=terms.k.double(), v=terms.v.double())


def bench(fn: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    timed: Any = do_bench
    return timed(fn, warmup=20, rep=80, return_mode="median")


def first(fn: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    fn()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def both_ways(run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> tuple[float, float]:
    """ms forward and backward"""
    with torch.no_grad():
        forward = bench(lambda: run(q, k, v))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = run(*leaves)
    do = torch.randn_like(o)
    return forward, bench(lambda: torch.autograd.grad(o, leaves, do, retain_graph=True))


def both(run: Callable[..., Tensor], *given: Tensor) -> None:
    leaves = [x.detach().requires_grad_() for x in given]
    torch.autograd.grad(run(*leaves).sum(), leaves)


def peer(backend: SDPBackend, causal: bool) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return run


def times() -> None:
    rows = []
    for B, T, H, D, causal in SHAPES:
        q, k, v = (torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        flops = 4 * B * H * T * T * D / (2 if causal else 1)

        def ours(*x: Tensor, causal: bool = causal) -> Tensor:
            return attention(*x, causal=causal)

        cold = first(functools.partial(both, ours, q, k, v))
        row: dict[str, object] = {"shape": f"{B},{T},{H},{D}", "causal": causal}
        for name, run in (
            ("slipstream", ours),
            ("flash", peer(SDPBackend.FLASH_ATTENTION, causal)),
            ("cudnn", peer(SDPBackend.CUDNN_ATTENTION, causal)),
        ):
            try:
                forward, backward = both_ways(run, q, k, v)
                row[f"{name} fwd"] = round(flops / forward / 1e9)
                row[f"{name} bwd"] = round(2.5 * flops / backward / 1e9)
            except Exception as e:
                print(f"{name} {row['shape']}: {type(e).__name__}: {str(e)[:200]}")
                row[f"{name} fwd"] = row[f"{name} bwd"] = 0
        rows.append({**row, "unit": "TFLOP/s", "first call s": round(cold, 2)})
        print(" ".join(f"{n} {x}" for n, x in rows[-1].items()), flush=True)
    record("attention_gpu", rows)
    packed()


def packed() -> None:
    """Mixed lengths beside equal ones of the same work."""
    mixed = torch.tensor([4096, 512, 2048, 1, 3000, 130, 5000, 1597])
    side = round(float(mixed.double().square().sum() / 8) ** 0.5)
    line = []
    for lengths in (mixed, torch.full((8,), side)):
        total = int(lengths.sum())
        cu = torch.tensor([0, *lengths.tolist()], device="cuda").cumsum(0).int()
        q, k, v = (
            torch.randn(1, total, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)
        )
        flops = 2 * 16 * 128 * float(lengths.double().square().sum())
        f, b = both_ways(lambda *x, cu=cu: attention(*x, cu_seqlens=cu), q, k, v)
        line.append(f"{flops / f / 1e9:.0f} / {2.5 * flops / b / 1e9:.0f}")
    print(f"packed causal D128, fwd / bwd TFLOP/s: mixed {line[0]}, equal {line[1]}")


def decode() -> None:
    rows = []
    for B, S, H, HKV, D, page in CACHES:
        call = cache_of(B, S, H, HKV, D, page)
        options = AttentionOptions(D**-0.5, -1, 0)
        try:
            ms = bench(functools.partial(decode_launch.decode, call, options))
        except Exception as e:
            print(f"decode {B},{S},{H},{HKV},{D},{page}: {type(e).__name__}: {str(e)[:200]}")
            continue
        size = 2 * B * S * HKV * D * 2
        row = {"shape": f"{B},{S},{H}/{HKV},{D}", "page": page, "ms": round(ms, 4)}
        row |= {
            "TB/s": round(size / ms / 1e9, 2),
            "of copy": round(size / ms / COPY_BYTES_PER_MS, 2),
        }
        rows.append(row)
        print("decode", " ".join(f"{n} {x}" for n, x in row.items()), flush=True)
    record("attention_decode_gpu", rows)


def host_time() -> None:
    q, k, v = (torch.randn(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attention(*leaves)
    do = torch.randn_like(o)
    call = cache_of(1, 512, 4, 2, 64, 0)
    for name, fn in (
        ("forward", lambda: attention(q, k, v)),
        ("backward", lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)),
        ("decode", lambda: decode_launch.decode(call, AttentionOptions(0.1, -1, 0))),
    ):
        fn()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            fn()
        print(f"host {name} {(time.perf_counter() - start) * 5e3:.0f} us a call")
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--impl", choices=("triton", "sm90"), default="triton")
    for name in ("check", "times", "decode", "sweep", "candidates", "peer", "tried"):
        parser.add_argument(f"--{name}", action="store_true")
    options = vars(parser.parse_args())
    impl = options.pop("impl")
    chosen = {n for n, x in options.items() if x} or {"check", "times", "decode", "peer"}
    if impl == "sm90":
        import attention_hopper

        return attention_hopper.main(*(n in chosen for n in ("check", "times", "peer", "tried")))
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    fine = check() if "check" in chosen else True
    if "times" in chosen:
        host_time()
        times()
    if "decode" in chosen:
        decode()
    if chosen & {"sweep", "candidates"}:
        import attention_tiles

        attention_tiles.main(*(n in chosen for n in ("sweep", "candidates")))
    raise SystemExit(0 if fine else "results differ from the reference")


if __name__ == "__main__":
    main()
