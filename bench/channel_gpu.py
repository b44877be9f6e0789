"""Decay per channel (gla, rwkv6, gsa) on a GPU: right at odd sizes, then how fast.

python bench/channel_gpu.py            # the comparison with the float64 reference, then the times
python bench/channel_gpu.py --check    # only the comparison, all cases at once
python bench/channel_gpu.py --times    # only the times, and those of each kernel
python bench/channel_gpu.py --peer     # the times, and those of fla's chunk_gla
python bench/channel_gpu.py --sweep    # tiles of each kernel, against the results of the table's
"""

import argparse
import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from launches import per_kernel
from record import record
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from slipstream.kernels.linear.triton.scalar_decay import tiles
from slipstream.kernels.linear.triton.vector_decay import backend as launch
from slipstream.kernels.linear.triton.vector_decay import (
    launch as vector_decay_launch,
)
from slipstream.kernels.linear.triton.vector_decay import (
    tiles as vector_decay_tiles,
)
from slipstream.ops import chunk_gla, chunk_gsa, chunk_linear_attn, chunk_rwkv6

COPY_BYTES_PER_MS = 4.28e9  # device copy on an H200
# of outputs, of gradients, of those of gates
LIMITS = {torch.float32: (1e-4, 1e-4, 1e-4), torch.bfloat16: (0.005, 0.008, 0.02)}
LIMITS[torch.float16] = LIMITS[torch.bfloat16]
GATES = ("weak", "medium", "mixed", "reset", "zero")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# form, dtype, dtype of gates, (B, T, H, HV, K, V), lengths of packed sequences; each compiles anew
ODD = [
    ("g", BF16, BF16, (1, 300, 3, 3, 128, 128), None),
    ("u", BF16, FP32, (1, 185, 2, 4, 64, 128), (5, 0, 100, 1, 64, 15)),
    ("g", FP32, FP32, (2, 70, 1, 1, 128, 128), None),
    ("gv", FP32, FP32, (1, 150, 2, 2, 64, 64), None),
    ("g", BF16, BF16, (1, 2100, 1, 1, 128, 64), None),
    ("gv", BF16, BF16, (1, 1900, 1, 1, 100, 40), (5, 0, 1700, 1, 194)),
    ("g", BF16, FP32, (1, 200, 1, 1, 256, 192), None),
    ("g", FP16, FP32, (1, 130, 1, 1, 30, 60), None),
    ("u", FP32, FP32, (1, 90, 2, 2, 17, 130), None),
]
# as above: form, dtype of gates, size
SHAPES = {
    "gla A": ("g", BF16, (1, 8192, 96, 96, 128, 128)),
    "gla A g fp32": ("g", FP32, (1, 8192, 96, 96, 128, 128)),
    "gla A mixed": ("g", BF16, (1, 8192, 96, 96, 128, 128)),
    "gla C": ("g", BF16, (1, 32768, 8, 8, 128, 128)),
    "rwkv6 A": ("u", BF16, (1, 8192, 96, 96, 128, 128)),
    "gsa A 64 slots": ("gsa", BF16, (1, 8192, 96, 96, 128, 128)),
    "linear_attn /sum": ("sum", BF16, (8, 2048, 16, 16, 128, 128)),
}
SLOTS = 64


def gates(kind: str, *shape: int, dtype: torch.dtype) -> Tensor:
    """medium: down to -1.5 a token, so that blocks of 32 tokens are safe, and not the chunk."""
    x = torch.rand(shape, device="cuda")
    weak = 0.1 * x
    return {
        "weak": lambda: -weak,
        "medium": lambda: -1.5 * x,
        "mixed": lambda: -torch.where(torch.rand_like(x) < 0.2, 50 * x, weak),
        "reset": lambda: torch.where(x < 0.1, -torch.inf, -weak),
        "zero": lambda: torch.zeros_like(x),
    }[kind]().to(dtype)


def inputs(form: str, kind: str, dtype: torch.dtype, gate: torch.dtype, size: tuple, **more: Any):
    B, T, H, HV, K, V = size
    q, k = (torch.randn(B, T, H, K, device="cuda", dtype=dtype) for _ in range(2))
    v = torch.randn(B, T, HV, V, device="cuda", dtype=dtype)
    g = gates(kind, B, T, HV, V if form == "gv" else K, dtype=gate)
    more["gv" if form == "gv" else "g"] = g
    if form == "u":
        more["u"] = torch.randn(HV, K, device="cuda")
    return LinearInputs(q, k, v, **more)


def error(got: Tensor, want: Tensor) -> float:
    size = want.double().square().mean().sqrt().item()
    off = (got.double() - want.double()).square().mean().sqrt().item()
    return off / size if size else off


def compare(form: str, dtype: torch.dtype, gate: torch.dtype, size: tuple, lengths, kind: str):
    """Relative errors by name; nan if two runs differ in a bit."""
    B, _, _, HV, K, V = size
    N = B if lengths is None else len(lengths)
    more: dict[str, Any] = {"initial_state": torch.randn(N, HV, K, V, device="cuda")}
    if lengths is not None:
        more["cu_seqlens"] = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    terms = inputs(form, kind, dtype, gate, size, **more)
    do, dfinal = torch.randn_like(terms.v), torch.randn(terms.state_shape, device="cuda")
    scale, runs = K**-0.5, []
    for _ in range(2):
        o, final = launch.forward(terms, scale)
        runs.append({"o": o, "final": final, **launch.backward(terms, do, dfinal, scale)})
    wide = {
        n: x.double().requires_grad_()
        for n, x in terms._asdict().items()
        if x is not None and n != "cu_seqlens"
    }
    o, final = linear_reference(LinearInputs(**wide, cu_seqlens=terms.cu_seqlens), scale)
    loss = (o * do.double()).sum() + (final * dfinal.double()).sum()
    grads = torch.autograd.grad(loss, list(wide.values()))
    want = {"o": o.detach(), "final": final.detach(), **dict(zip(wide, grads))}
    same = {n: torch.equal(runs[0][n], runs[1][n]) for n in want}
    return {n: error(runs[0][n], x) if same[n] else float("nan") for n, x in want.items()}


def check_case(index: int) -> bool:
    """One line: the worst error of each result over the gates."""
    form, dtype, gate, size, lengths = ODD[index]
    label = f"{form:2} {str(dtype)[6:]:8} gates {str(gate)[6:]:8} {size}"
    label += " packed" if lengths else ""
    worst: dict[str, tuple[float, str]] = {}
    for kind in GATES:
        for name, e in compare(form, dtype, gate, size, lengths, kind).items():
            if not e <= worst.get(name, (-1.0, ""))[0]:
                worst[name] = (e, kind)
    return tell(label, dtype, worst)


def tell(
    label: str, dtype: torch.dtype, worst: dict[str, tuple[float, str]], slack: float = 1.0
) -> bool:
    line, fine = [], True
    for name, (e, kind) in worst.items():
        limit = slack * LIMITS[dtype][{"o": 0, "final": 0, "g": 2, "gv": 2}.get(name, 1)]
        fine &= e <= limit
        line.append(f"{name} {e:.1e}" + ("" if e <= limit else f" WRONG {kind}"))
    print(label, ", ".join(line), flush=True)
    return fine


def check_operator(name: str) -> bool:
    """An operator of several runs in bfloat16, beside itself in float32 on the same numbers."""
    T = 500
    q, k, v = (torch.randn(2, T, 4, 128, device="cuda", dtype=BF16) for _ in range(3))
    x, fn, state = {"q": q, "k": k, "v": v}, cast(Any, chunk_linear_attn), cast(Any, None)
    if name == "gsa":
        x["s"] = torch.randn(2, T, 4, SLOTS, device="cuda", dtype=BF16)
        x["g"] = gates("weak", 2, T, 4, SLOTS, dtype=FP32)
        state = tuple(torch.randn(2, 4, *n, device="cuda") for n in ((128, SLOTS), (SLOTS, 128)))
        fn = cast(Any, chunk_gsa)
    else:
        x |= {"q": q.abs(), "k": k.abs()}
        state = (torch.randn(2, 4, 128, 128, device="cuda"), torch.rand(2, 1, 4, 128).cuda())
    do, results = torch.randn_like(v), []
    for dtype in (BF16, FP32):
        leaves = {n: t.detach().to(dtype if n != "g" else FP32) for n, t in x.items()}
        leaves = {n: t.requires_grad_() for n, t in leaves.items()}
        o, final = fn(**leaves, initial_state=state, output_final_state=True)
        grads = torch.autograd.grad(o, list(leaves.values()), do.to(dtype))
        results.append({"o": o, **dict(zip(("s0", "s1"), final)), **dict(zip(leaves, grads))})
    worst = {n: (error(got, results[1][n]), "") for n, got in results[0].items()}
    # in a softmax the errors of scores count by the scores' size, also those of rounded inputs
    return tell(f"{name} bfloat16 beside float32", BF16, worst, 3.0 if name == "gsa" else 1.0)


OPERATORS = ("gsa", "linear_attn")


def check() -> bool:
    """Every case in a process of its own, since it compiles anew."""
    cases = [*map(str, range(len(ODD))), *OPERATORS]
    torch.cuda.init()
    run = [sys.executable, __file__, "--case"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*run, case], **pipes) for case in cases]
    fine = True
    for case, process in zip(cases, started):
        out, err = process.communicate(timeout=600)
        why = "" if out.strip() else f"case {case} RAISED {err.strip().splitlines()[-1:]}"
        print(out.strip() or why[:300], flush=True)
        fine &= process.returncode == 0
    return fine


def bench(fn: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    timed: Any = do_bench
    return timed(fn, warmup=15, rep=60, return_mode="median")


def first(fn: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    fn()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def operator(form: str, x: dict[str, Any], impl: str = "triton") -> Tensor:
    if form == "gsa":
        return chunk_gsa(**x, impl=impl)[0]
    if form == "sum":
        return chunk_linear_attn(**x, impl=impl)[0]
    if form == "u":
        return chunk_rwkv6(r=x["q"], k=x["k"], v=x["v"], w=x["g"], u=x["u"], impl=impl)[0]
    return chunk_gla(**x, impl=impl)[0]


def arguments(label: str) -> tuple[str, dict[str, Tensor]]:
    """The operator's tensors, which want gradients."""
    form, gate, size = SHAPES[label]
    kind = "mixed" if "mixed" in label else "weak"
    terms = inputs("g" if form in ("gsa", "sum") else form, kind, BF16, gate, size)
    x = {n: t for n, t in terms._asdict().items() if t is not None}
    if form == "sum":
        x = {"q": x["q"].abs(), "k": x["k"].abs(), "v": x["v"]}
    if form == "gsa":
        B, T, H = size[:3]
        x["s"] = torch.randn(B, T, H, SLOTS, device="cuda", dtype=BF16)
        x["g"] = x["g"][..., :SLOTS].contiguous()
    return form, {n: t.requires_grad_() for n, t in x.items()}


def measure(fn: Callable[..., Tensor], x: dict[str, Tensor]) -> dict[str, float]:
    """ms, seconds of the first calls, and of memory what is neither argument nor result."""
    do = torch.randn_like(x["v"])

    def forward() -> Any:
        with torch.no_grad():
            return fn(x)

    def both() -> Any:
        return torch.autograd.grad(fn(x), list(x.values()), do)

    row = {"first_fwd_s": first(forward), "first_both_s": first(both)}
    given = sum(t.numel() * t.element_size() for t in x.values())
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward()
    fwd = torch.cuda.max_memory_allocated() - held - do.nbytes
    torch.cuda.reset_peak_memory_stats()
    both()
    back = torch.cuda.max_memory_allocated() - held - do.nbytes - given
    row["extra_fwd"] = fwd / (given + do.nbytes)
    row["extra_both"] = back / (2 * given + 2 * do.nbytes)
    row["fwd_ms"], row["both_ms"] = bench(forward), bench(both)
    row["floor_fwd_ms"] = (given + do.nbytes) / COPY_BYTES_PER_MS
    row["floor_both_ms"] = (3 * given + 2 * do.nbytes) / COPY_BYTES_PER_MS
    return row


def show(label: str, who: str, row: dict[str, float]) -> dict[str, object]:
    print(
        f"{label:15} {who:10} fwd {row['fwd_ms']:.3f} ms (floor {row['floor_fwd_ms']:.2f}), "
        f"fwd+bwd {row['both_ms']:.3f} ({row['floor_both_ms']:.2f}); first "
        f"{row['first_fwd_s']:.1f} + {row['first_both_s']:.1f} s; memory beyond arguments and "
        f"results {row['extra_fwd']:+.0%}, {row['extra_both']:+.0%}",
        flush=True,
    )
    return {"shape": label, "who": who, **{n: f"{x:.4g}" for n, x in row.items()}}


def kernels(label: str, x: dict[str, Tensor]) -> None:
    """Of forward and backward, each launch."""
    terms = LinearInputs(**{n: t.detach() for n, t in x.items()})
    do, scale = torch.randn_like(terms.v), terms.q.shape[-1] ** -0.5
    for name, fn in (
        ("forward", lambda: launch.forward(terms, scale)),
        ("backward", lambda: launch.backward(terms, do, None, scale)),
    ):
        each = per_kernel(fn, launch, vector_decay_launch)
        text = ", ".join(f"{n.removeprefix('vector_decay_')} {ms:.3f}" for n, ms in each.items())
        print("   ", name, f"{sum(each.values()):.3f} ms:", text, flush=True)


def times(peer: bool) -> None:
    rows = []
    for label in SHAPES:
        try:
            form, x = arguments(label)
            rows.append(show(label, "slipstream", measure(lambda x, f=form: operator(f, x), x)))
            if form not in ("gsa", "sum") and "fp32" not in label:
                kernels(label, x)
        except Exception as e:
            print(label, f"RAISED {type(e).__name__}: {str(e)[:200]}".replace("\n", " "))
        x = None
        torch.cuda.empty_cache()
    if peer:  # it tunes for minutes
        try:
            from fla.ops.gla import chunk_gla as peer_gla  # pyright: ignore[reportMissingImports]

            _, x = arguments("gla A")
            rows.append(show("gla A", "fla", measure(lambda x: peer_gla(**x)[0], x)))
        except Exception as e:
            print("fla", f"RAISED {type(e).__name__}: {str(e)[:200]}".replace("\n", " "))
    if rows:
        record("channel_gpu_times", rows)


def host_time() -> None:
    terms = inputs("g", "weak", BF16, BF16, (1, 64, 1, 1, 128, 128))
    do = torch.randn_like(terms.v)
    for name, fn in (
        ("forward", lambda: launch.forward(terms, 0.1)),
        ("backward", lambda: launch.backward(terms, do, None, 0.1)),
    ):
        fn()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            fn()
        print(f"host {name} {(time.perf_counter() - start) * 5e3:.0f} us a call")
        torch.cuda.synchronize()


WALK = ("sm_90", 2, 128)
SWEEP = [  # what takes the place of a row of the tables
    ("prepare", vector_decay_tiles.KernelTile(64, 4, 1)),
    ("prepare", vector_decay_tiles.KernelTile(32, 4, 3)),
    ("prepare", vector_decay_tiles.KernelTile(128, 8, 1)),
    ("grads", vector_decay_tiles.KernelTile(32, 4, 1)),
    ("grads", vector_decay_tiles.KernelTile(64, 8, 1)),
    ("walk", tiles.Tile(64, 64, 4, 3, tma=True)),
    ("walk", tiles.Tile(64, 64, 8, 2, tma=True)),
    ("walk", tiles.Tile(64, 128, 8, 2, tma=True)),
    ("walk", tiles.Tile(64, 64, 4, 2)),
]


def sweep(label: str) -> None:
    """One kernel's tile at a time in place of the table's, against the table's results."""
    key = ("sm_90", 2)
    kept, walk = vector_decay_tiles.TILES[key], vector_decay_tiles.CHUNK_TILES[WALK]
    _, x = arguments(label)
    terms = LinearInputs(**{n: t.detach() for n, t in x.items()})
    do = torch.randn_like(terms.v)

    def run() -> dict[str, Tensor]:
        return {"o": launch.forward(terms, 0.1)[0], **launch.backward(terms, do, None, 0.1)}

    want = run()
    rows: list[dict[str, object]] = []
    for name, part in [("table's", None), *SWEEP]:
        if name == "walk":
            vector_decay_tiles.CHUNK_TILES[WALK] = part
        elif part is not None:
            vector_decay_tiles.TILES[key] = dataclasses.replace(kept, **{name: part})
        launch._tile.cache_clear()
        vector_decay_launch._chunk_tile.cache_clear()
        try:
            got = run()
            off = max(error(got[n], want[n]) for n in want)
            fwd = bench(lambda: launch.forward(terms, 0.1))
            back = bench(lambda: launch.backward(terms, do, None, 0.1))
            text = f"forward {fwd:.3f}, backward {back:.3f} ms, off by {off:.1e}"
        except Exception as e:  # too much shared memory is a row too
            text = type(e).__name__
        print(label, name, part, text, flush=True)
        rows.append({"shape": label, "kernel": name, "tile": str(part), "result": text})
        vector_decay_tiles.TILES[key], vector_decay_tiles.CHUNK_TILES[WALK] = kept, walk
    launch._tile.cache_clear()
    vector_decay_launch._chunk_tile.cache_clear()
    record("channel_gpu_tiles", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("check", "times", "peer", "sweep"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--case", help="one of the comparison's")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.case:
        by_name = options.case in OPERATORS
        fine = check_operator(options.case) if by_name else check_case(int(options.case))
        raise SystemExit(0 if fine else "WRONG")
    print(torch.cuda.get_device_name(), torch.__version__)
    everything = not (options.check or options.times or options.peer or options.sweep)
    fine = True
    if options.check or everything:
        fine = check()
    if options.times or options.peer or everything:
        host_time()
        times(options.peer)
    if options.sweep:
        sweep("gla A")
    raise SystemExit(0 if fine else "results differ from the reference")


if __name__ == "__main__":
    main()
