"""The additive linear family on a GPU: right at odd sizes, then how fast, beside fla-core if there.

python bench/linear_gpu.py            # the comparison with the float64 reference, then the times
python bench/linear_gpu.py --check    # only the comparison
python bench/linear_gpu.py --times    # only the times, memory, and each kernel
python bench/linear_gpu.py --peer     # the times, and fla's, which tunes for minutes
python bench/linear_gpu.py --sweep    # tiles of the walk, against the results of the table's
... --hopper                          # the walk for sm_90 in Gluon instead of the portable one
"""

import argparse
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from launches import per_kernel
from record import record
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from slipstream.kernels.linear.triton.plan import unsupported_reason
from slipstream.kernels.linear.triton.scalar_decay import launch, tiles

# what is measured; additive_launch with --hopper
USED: Any = launch
COPY_BYTES_PER_MS = 4.28e9  # device copy on an H200
# B, T, H, K, V
SHAPES = {"A": (1, 8192, 96, 128, 128), "C": (1, 32768, 8, 128, 128)}
LIMITS = {torch.float32: (1e-4, 1e-4, 1e-4), torch.bfloat16: (0.005, 0.008, 0.02)}
LIMITS[torch.float16] = LIMITS[torch.bfloat16]
# B, T, H, HV, K, V, lengths of packed sequences
ODD = [
    (2, 70, 1, 1, 30, 60, None),
    (1, 333, 2, 2, 64, 64, None),
    (1, 300, 3, 3, 128, 128, None),
    (2, 130, 2, 4, 100, 40, None),
    (1, 321, 2, 2, 256, 192, None),
    (1, 200, 1, 1, 17, 256, None),
    (1, 385, 2, 4, 128, 64, (5, 0, 200, 1, 64, 115)),
    (1, 2300, 1, 1, 64, 128, None),
    (1, 90, 128, 128, 64, 64, None),
    (1, 4200, 1, 2, 64, 128, (5, 0, 4000, 1, 194)),
]
# what the walk for sm_90 takes of sizes
HOPPER_ODD = [
    (1, 300, 3, 3, 128, 128, None),
    (2, 70, 1, 2, 128, 128, None),
    (1, 64, 1, 140, 128, 128, None),
    (1, 333, 2, 4, 128, 128, (5, 0, 200, 1, 64, 63)),
    (1, 2300, 1, 1, 128, 128, None),
    (1, 4200, 1, 2, 128, 128, (5, 0, 4000, 1, 194)),
]


def inputs(B, T, H, HV, K, V, lengths, dtype, gate: str, state: bool) -> LinearInputs:
    N = B if lengths is None else len(lengths)
    make: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    x = torch.rand(B, T, HV, device="cuda")
    rate = torch.exp2(-5.0 - torch.arange(HV, device="cuda"))
    g = {
        "none": None,
        "retention": torch.log1p(-rate).expand(x.shape),
        "weak": -0.1 * x,
        "mixed": -torch.where(torch.rand_like(x) < 0.2, 50 * x, 0.1 * x),
    }[gate]
    cu = None
    if lengths is not None:
        cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    return LinearInputs(
        torch.randn(B, T, H, K, **make),
        F.normalize(torch.randn(B, T, H, K, **make), dim=-1),
        torch.randn(B, T, HV, V, **make),
        g=g,
        initial_state=torch.randn(N, HV, K, V, device="cuda") if state else None,
        cu_seqlens=cu,
    )


def error(got: Tensor, want: Tensor) -> float:
    size = want.double().square().mean().sqrt().item()
    off = (got.double() - want.double()).square().mean().sqrt().item()
    return off / size if size > 1e-30 else off  # gates may leave less than float32 holds


def chunked(terms: LinearInputs, scale: float) -> tuple[Tensor, Tensor]:
    """The float64 oracle; for long sequences the chunkwise torch path, itself tested against it."""
    if terms.q.shape[1] * terms.v.shape[2] <= 800:
        return linear_reference(terms, scale)
    from slipstream.kernels.linear.op import linear

    return linear(terms, scale, 64, "eager")


def compare(size: Any, dtype: torch.dtype, gate: str, state: bool) -> dict[str, float]:
    terms = inputs(*size, dtype=dtype, gate=gate, state=state)
    assert unsupported_reason(terms) is None, unsupported_reason(terms)
    scale = terms.q.shape[-1] ** -0.5
    do = torch.randn_like(terms.v)
    dfinal = torch.randn(terms.state_shape, device="cuda") if state else None
    o, final = USED.forward(terms, scale)
    got = {"o": o, "final": final, **USED.backward(terms, do, dfinal, scale)}
    again = {"o": o, "final": final, **USED.backward(terms, do, dfinal, scale)}
    assert all(torch.equal(got[n], again[n]) for n in got), "not the same bits twice"
    wide = {
        n: x.detach().cpu().double().requires_grad_()
        for n, x in terms._asdict().items()
        if x is not None and n != "cu_seqlens"
    }
    cu = None if terms.cu_seqlens is None else terms.cu_seqlens.cpu()
    o, final = chunked(LinearInputs(**wide, cu_seqlens=cu), scale)
    loss = (o * do.cpu().double()).sum()
    if dfinal is not None:
        loss = loss + (final * dfinal.cpu().double()).sum()
    grads = torch.autograd.grad(loss, list(wide.values()))
    want = {"o": o.detach(), "final": final.detach(), **dict(zip(wide, grads))}
    return {n: error(got[n].cpu(), want[n]) for n in got}


def check(part: int, parts: int) -> bool:
    """One line a dtype and gate: the worst error of each result over the sizes."""
    fine = True
    cases = [(dtype, gate) for dtype in LIMITS for gate in ("none", "retention", "weak", "mixed")]
    for dtype, gate in cases[part::parts]:
        limits = LIMITS[dtype]
        worst: dict[str, tuple[float, tuple]] = {}
        for i, size in enumerate(HOPPER_ODD if USED is not launch else ODD):
            if dtype == torch.float16 and i % 2:
                continue
            for name, e in compare(size, dtype, gate, state=i % 2 == 0).items():
                if not e <= worst.get(name, (-1.0, ()))[0]:
                    worst[name] = (e, size)
        line = []
        for name, (e, size) in worst.items():
            limit = limits[0 if name in ("o", "final") else 2 if name == "g" else 1]
            ok = e <= limit
            fine &= ok
            line.append(f"{name} {e:.1e}" + ("" if ok else f" WRONG at {size}"))
        print(f"{str(dtype)[6:]:9} {gate:10}", ", ".join(line), flush=True)
    return fine


def floor(shape: tuple, gate: str, backward: bool) -> float:
    """ms: each input read and each output written once."""
    B, T, H, K, V = shape
    qk, v = B * T * H * K * 2, B * T * H * V * 2
    g = B * T * H * 4 if gate in ("weak", "mixed") else 0
    forward = 2 * qk + 2 * v + g
    return (forward + (4 * qk + 3 * v + 2 * g if backward else 0)) / COPY_BYTES_PER_MS


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


def times(label: str, shape: tuple, gate: str) -> dict[str, object]:
    B, T, H, K, V = shape
    terms = inputs(B, T, H, H, K, V, None, torch.bfloat16, gate, state=False)
    do, scale = torch.randn_like(terms.v), K**-0.5
    wants_dg = gate == "weak"

    def fwd() -> Any:
        return USED.forward(terms, scale)

    def both() -> None:
        fwd()
        USED.backward(terms, do, None, scale, gate_gradient=wants_dg)

    cold = first(fwd), first(both)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    inputs_bytes = sum(x.nbytes for x in (*terms, do) if isinstance(x, Tensor))
    held = 2 * inputs_bytes  # a result or gradient for each
    extra = (torch.cuda.max_memory_allocated() - before + inputs_bytes) / held - 1
    f, fb = bench(fwd), bench(both)
    ff, fbf = floor(shape, gate, False), floor(shape, gate, True)
    print(
        f"{label} {gate:10} fwd {f:.3f} ms x{f / ff:.2f} of floor, fwd+bwd {fb:.3f} ms "
        f"x{fb / fbf:.2f}; first {cold[0]:.2f} + {cold[1]:.2f} s; memory beyond inputs, results, "
        f"gradients {extra:+.0%}",
        flush=True,
    )
    each = per_kernel(both, *{launch, USED})
    text = ", ".join(f"{n.replace('linear_', '')} {ms:.3f}" for n, ms in each.items())
    print("   ", text, flush=True)
    names = ("fwd_ms", "both_ms", "first_fwd_s", "first_both_s", "extra_memory")
    numbers = (f, fb, *cold, extra)
    row = {n: f"{x:.4g}" for n, x in zip(names, numbers, strict=True)}
    who = "slipstream" if USED is launch else "slipstream sm_90"
    return {"shape": label, "who": f"{who} {gate}", **row}


PEERS = {
    "none": ("fla.ops.linear_attn", "chunk_linear_attn", {"normalize": False}),
    "retention": ("fla.ops.retention", "chunk_retention", {}),
    "weak": ("fla.ops.simple_gla", "chunk_simple_gla", {}),
}


def peer(shape: tuple, gate: str) -> None:
    module, name, options = PEERS[gate]
    try:
        fn = getattr(importlib.import_module(module), name)
    except ImportError:
        return
    B, T, H, K, V = shape
    terms = inputs(B, T, H, H, K, V, None, torch.bfloat16, gate, state=False)
    args = [x.detach().requires_grad_() for x in terms[:3]]
    if gate == "weak" and terms.g is not None:
        options = {"g": terms.g.detach().requires_grad_()}
    do = torch.randn_like(terms.v)

    def fwd() -> Any:
        with torch.no_grad():
            return fn(*args, scale=K**-0.5, **options)

    def both() -> None:
        o = fn(*args, scale=K**-0.5, **options)[0]
        leaves = [*args, *(x for x in options.values() if isinstance(x, Tensor))]
        torch.autograd.grad(o, leaves, do)

    try:
        cold = first(fwd), first(both)
        print(
            f"fla  {gate:10} fwd {bench(fwd):.3f} ms, fwd+bwd {bench(both):.3f} ms; "
            f"first {cold[0]:.1f} + {cold[1]:.1f} s",
            flush=True,
        )
    except Exception as error:  # a peer that refuses or dies is a row too
        print(f"fla  {gate:10} {type(error).__name__}: {str(error)[:90]}", flush=True)


def host_time() -> None:
    terms = inputs(1, 64, 1, 1, 64, 64, None, torch.bfloat16, "weak", state=False)
    do = torch.randn_like(terms.v)
    for name, fn in (
        ("forward", lambda: USED.forward(terms, 0.1)),
        ("backward", lambda: USED.backward(terms, do, None, 0.1)),
    ):
        fn()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            fn()
        print(f"host {name} {(time.perf_counter() - start) * 5e3:.0f} us a call")
        torch.cuda.synchronize()


SWEEP = [
    (64, 64, 4, 3, True),
    (64, 64, 4, 2, True),
    (64, 64, 8, 2, True),
    (64, 128, 8, 2, True),
    (64, 128, 8, 3, True),
]


def sweep(label: str, gate: str) -> None:
    """Forward and backward with one tile in place of the table's, against the table's results."""
    B, T, H, K, V = SHAPES[label]
    terms = inputs(B, T, H, H, K, V, None, torch.bfloat16, gate, state=False)
    do = torch.randn_like(terms.v)
    row = ("sm_90", 2, 128)
    kept = tiles.TILES[row]

    def run() -> dict[str, Tensor]:
        return {"o": USED.forward(terms, 0.1)[0], **USED.backward(terms, do, None, 0.1)}

    want = run()
    rows: list[dict[str, object]] = []
    for tile in SWEEP:
        tiles.TILES[row] = tiles.Tile(*tile)
        launch._tile.cache_clear()
        try:
            off = max(error(x, want[n]) for n, x in run().items())
            f = bench(lambda: USED.forward(terms, 0.1))
            b = bench(lambda: USED.backward(terms, do, None, 0.1))
            b0 = bench(lambda: USED.backward(terms, do, None, 0.1, gate_gradient=False))
            text = f"fwd {f:.3f}, bwd {b:.3f}, without dg {b0:.3f} ms, off by {off:.1e}"
        except Exception as e:  # too much shared memory is a row too
            text = type(e).__name__
        print(label, gate, tile, text, flush=True)
        rows.append({"shape": label, "gate": gate, "tile": str(tile), "result": text})
    tiles.TILES[row] = kept
    launch._tile.cache_clear()
    record("linear_gpu_tiles", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("check", "times", "peer", "sweep", "sm90"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--part", default="0/1", help="of the check's cases, such as 2/8")
    options = parser.parse_args()
    if options.hopper:
        from slipstream.kernels.linear.sm90.scalar_decay import backend

        globals()["USED"] = backend
        del LIMITS[torch.float32]
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    everything = not (options.check or options.times or options.peer or options.sweep)
    fine = True
    if options.check or everything:
        fine = check(*map(int, options.part.split("/")))
    if options.times or options.peer or everything:
        host_time()
        rows = []
        for label, shape in SHAPES.items():
            for gate in PEERS:
                try:
                    rows.append(times(label, shape, gate))
                except Exception as e:
                    print(label, gate, f"RAISED {type(e).__name__}: {str(e)[:150]}")
        if rows:
            record("linear_gpu_times", rows)
    if options.sweep:
        for gate in ("none", "weak"):
            sweep("A", gate)
    if options.peer:
        for label, shape in SHAPES.items():
            print(label)
            for gate in PEERS:
                peer(shape, gate)
    raise SystemExit(0 if fine else "results differ from the reference")


if __name__ == "__main__":
    main()
