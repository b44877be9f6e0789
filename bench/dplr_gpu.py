"""Per-channel decay, and free a and b, on a GPU: right at odd sizes, then how fast.

python bench/dplr_gpu.py            # --check, then --times
python bench/dplr_gpu.py --check    # against the float64 reference, groups in parallel processes
python bench/dplr_gpu.py --times    # kda, rwkv7 and dplr, and each of their kernels
python bench/dplr_gpu.py --check --part 0/2   # half of the groups
python bench/dplr_gpu.py --times --peer   # beside fla, which tunes for minutes at first
python bench/dplr_gpu.py --sweep    # tiles of each kernel, their results too
python bench/dplr_gpu.py --sweep --kernels scores,grads
"""

import argparse
import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.record import record
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from slipstream.kernels.linear.triton.delta.tiles import KernelTile
from slipstream.kernels.linear.triton.dplr import backend as launch
from slipstream.kernels.linear.triton.dplr import launch as triton_dplr_launch
from slipstream.kernels.linear.triton.dplr import tiles


def own(terms: LinearInputs) -> Any:
    """The kernels that the plan takes."""
    from slipstream.kernels.linear.sm90 import plan

    if plan.unsupported_reason(terms) is not None:
        return None
    from slipstream.kernels.linear.sm90.dplr import backend

    return backend


COPY_BYTES_PER_MS = 4.28e9  # device copy on an H200
TIMED = (1, 8192, 96, 96, 128, 128, None)
# of outputs, of gradients, of those of g and beta
LIMITS = {torch.float32: (1e-4, 1e-4, 1e-4), torch.bfloat16: (0.005, 0.008, 0.02)}
LIMITS[torch.float16] = LIMITS[torch.bfloat16]
# B, T, H, HV, K, V, lengths of packed sequences
WHOLE = (1, 300, 2, 2, 128, 128, None)
PACKED = (1, 385, 2, 4, 128, 128, (5, 0, 200, 1, 64, 115))
ODD = (2, 130, 1, 2, 100, 40, None)
SMALL = (2, 70, 1, 1, 30, 64, None)
NARROW = (1, 200, 2, 2, 60, 30, None)
LARGE = (1, 150, 1, 1, 256, 192, None)
# kind, dtype, sizes: each compiles its own kernels, so each gets a process
GROUPS = [
    *((kind, "bfloat16", (size,)) for kind in ("kda", "dplr") for size in (WHOLE, PACKED)),
    *((kind, "bfloat16", (ODD, SMALL)) for kind in ("kda", "dplr")),
    *((kind, "bfloat16", (LARGE,)) for kind in ("kda", "dplr")),
    *((kind, "float32", (WHOLE, SMALL)) for kind in ("kda", "dplr")),
    *((kind, "float32", (NARROW, PACKED)) for kind in ("kda", "dplr")),
    *((kind, "float32", (LARGE,)) for kind in ("kda", "dplr")),
    *((kind, "float16", (WHOLE, SMALL)) for kind in ("kda", "dplr")),
    ("iplr", "bfloat16", (WHOLE, ODD)),
    ("scalar", "bfloat16", (WHOLE,)),
    ("rwkv7", "bfloat16", ((1, 4096, 2, 2, 128, 128, (1000, 96, 3000)),)),
]
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "weak": lambda x: -0.1 * x,
    "rwkv7": lambda x: -0.6065 * x,
    "middle": lambda x: -3 * x,
    "strong": lambda x: -50 * x,
    "mixed": lambda x: -torch.where(torch.rand_like(x) < 0.2, 50 * x, 0.1 * x),
    "reset": lambda x: torch.where(x < 0.1, -torch.inf, -0.1 * x),
}


def inputs(
    kind: str, size: tuple, gate: str, dtype: torch.dtype, state: bool, narrow: bool = False
) -> LinearInputs:
    """Keys and a of norm 1, beta from 0 to 2 (norm of the transition at most 1).

    narrow: gates are of dtype, not float32.
    """
    B, T, H, HV, K, V, lengths = size
    N = B if lengths is None else len(lengths)
    make = {"device": "cuda", "dtype": dtype}
    q, k, a = (torch.randn(B, T, H, K, **make) for _ in range(3))
    k, a = (F.normalize(x, dim=-1) for x in (k, a))
    x = torch.rand(B, T, HV, *(() if kind == "scalar" else (K,)), device="cuda")
    cu = None
    if lengths is not None:
        cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    b = -(a.float() * torch.rand(B, T, H, 1, device="cuda")).to(dtype)
    return LinearInputs(
        q,
        k,
        torch.randn(B, T, HV, V, **make),
        g=None if kind == "iplr" else GATES[gate](x).to(dtype if narrow else x.dtype),
        beta=2 * torch.rand(B, T, HV, device="cuda") if kind == "kda" else None,
        a=None if kind == "kda" else a,
        b=None if kind == "kda" else b,
        initial_state=torch.randn(N, HV, K, V, device="cuda") if state else None,
        cu_seqlens=cu,
    )


def error(got: Tensor, want: Tensor) -> float:
    size = want.double().square().mean().sqrt().item()
    off = (got.double() - want.double()).square().mean().sqrt().item()
    return off / size if size else off


def run_ours(kind: str, terms: LinearInputs, do: Tensor, dfinal: Tensor, scale: float) -> dict:
    """Results by name; rwkv7 by way of its public function."""
    if kind != "rwkv7":
        o, final = launch.forward(terms, scale, own(terms))
        return {"o": o, "final": final, **launch.backward(terms, do, dfinal, scale, own(terms))}
    from slipstream.ops.rwkv7 import chunk_rwkv7

    names = ("q", "g", "k", "v", "a", "b", "initial_state")
    leaves = [getattr(terms, n).detach().requires_grad_() for n in names]
    q, g, k, v, a, b, s = leaves
    o, final = chunk_rwkv7(
        r=q, w=g, k=k, v=v, a=a, b=b, initial_state=s, output_final_state=True,
        cu_seqlens=terms.cu_seqlens, scale=scale, impl="triton",
    )  # fmt: skip
    assert final is not None
    grads = torch.autograd.grad([o, final], leaves, [do, dfinal])
    return {"o": o.detach(), "final": final.detach(), **dict(zip(names, grads))}


def compare(
    kind: str, size: tuple, dtype: torch.dtype, gate: str, narrow: bool = False
) -> dict[str, float]:
    """Errors by name; nan where two runs differ in a bit."""
    terms = inputs(kind, size, gate, dtype, state=True, narrow=narrow)
    scale = terms.q.shape[-1] ** -0.5
    do, dfinal = torch.randn_like(terms.v), torch.randn(terms.state_shape, device="cuda")
    got, again = (run_ours(kind, terms, do, dfinal, scale) for _ in range(2))
    wide = {
        n: x.detach().double().requires_grad_()
        for n, x in terms._asdict().items()
        if x is not None and n != "cu_seqlens"
    }
    o, final = linear_reference(LinearInputs(**wide, cu_seqlens=terms.cu_seqlens), scale)
    loss = (o * do.double()).sum() + (final * dfinal.double()).sum()
    grads = torch.autograd.grad(loss, list(wide.values()))
    want = {"o": o.detach(), "final": final.detach(), **dict(zip(wide, grads))}
    same = {n: torch.equal(got[n], again[n]) for n in want}
    return {n: error(got[n], x) if same[n] else float("nan") for n, x in want.items()}


def check_group(index: int) -> bool:
    """One line: the worst error of each result over sizes and gates."""
    kind, name, sizes = GROUPS[index]
    dtype = getattr(torch, name)
    gates = {"iplr": ("zero",), "rwkv7": ("rwkv7",)}.get(kind, tuple(GATES))
    worst: dict[str, tuple[float, tuple]] = {}
    start = time.perf_counter()
    for size in sizes:
        for gate in gates:
            for n, e in compare(kind, size, dtype, gate).items():
                if not e <= worst.get(n, (-1.0, ()))[0]:
                    worst[n] = (e, (gate, *size))
    line, fine = [], True
    for n, (e, where) in worst.items():
        ok = e <= LIMITS[dtype][{"o": 0, "final": 0, "g": 2, "beta": 2}.get(n, 1)]
        fine &= ok
        line.append(f"{n[:5]} {e:.1e}" + ("" if ok else f" WRONG {where}"))
    seconds = time.perf_counter() - start
    print(f"{kind:6} {name:8} {[s[4:6] for s in sizes]}", *line, f"({seconds:.0f} s)", flush=True)
    return fine


def start(*options: str) -> subprocess.Popen:
    run = [sys.executable, __file__, *options]
    return subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen, name: Any) -> str:
    """What it printed, or why it didn't."""
    out, err = process.communicate(timeout=600)
    last = err.strip().splitlines()[-1:] if process.returncode and not out else ()
    return out.strip() or f"{name} failed: {last}"


def check(part: str) -> bool:
    torch.cuda.init()
    k, n = map(int, part.split("/"))
    groups = range(k, len(GROUPS), n)
    started = [start("--group", str(i)) for i in groups]
    fine = True
    for i, process in zip(groups, started):
        print(finish(process, GROUPS[i][:2]), flush=True)
        fine &= process.returncode == 0
    return fine


def floor(terms: LinearInputs, backward: bool) -> float:
    """ms: each input read and each output written once."""
    given = [x for n, x in terms._asdict().items() if x is not None]
    read = sum(x.numel() * x.element_size() for x in given)
    o = terms.v.numel() * terms.v.element_size()
    return (read + o + (2 * read + o if backward else 0)) / COPY_BYTES_PER_MS


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


def stages(terms: LinearInputs, scale: float) -> dict[str, Callable[[], Any]]:
    """Each kernel alone, on what the others left."""
    terms = launch._all_contiguous(terms)
    do, o = (torch.randn_like(terms.v) for _ in range(2))
    final = do.new_empty(terms.state_shape, dtype=torch.float32)
    kept = launch._prepare(terms, scale, keep=True, own=own(terms))
    x, states = launch._saved_intra_chunk(terms, kept)
    walked = launch.BackwardStates(x, torch.empty_like(x), states, torch.empty_like(states))
    split, state, dend, _ = launch.entry_states(terms, do, kept, None, None, own(terms))
    there = {"s_in": state, "split": split}
    back = {"y": walked.y, "dstates": walked.dstates, "s_in": dend, "split": split}
    launch.chunk_fwd(terms, kept, own(terms), x=x, states=states, **there)
    launch.chunk_dstate(terms, do, kept, own(terms), **back)
    scores, _, dbeta = launch._scores(terms, do, kept, walked, scale, own(terms))
    return {
        "prepare": lambda: launch._prepare(terms, scale, keep=True, own=own(terms)),
        "walk": lambda: launch.run_segment_ends(terms, kept, o, final, own(terms)),
        "keep": lambda: launch.chunk_fwd(terms, kept, own(terms), x=x, states=states, **there),
        "back": lambda: launch.chunk_dstate(terms, do, kept, own(terms), **back),
        "scores": lambda: launch._scores(terms, do, kept, walked, scale, own(terms)),
        "grads": lambda: launch._grads(
            terms, do, walked, scores, dbeta, kept.strong, scale, own(terms)
        ),
    }


def peer(kind: str, terms: LinearInputs, scale: float) -> Callable[[], Any]:
    """fla's operator, as a function of leaves made here."""
    q, k, v, g, beta, a, b = (
        None if x is None else x.detach().requires_grad_()
        for x in (terms.q, terms.k, terms.v, terms.g, terms.beta, terms.a, terms.b)
    )
    if kind == "kda":
        from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

        return lambda: chunk_kda(q=q, k=k, v=v, g=g, beta=beta, scale=scale)[0]
    if kind == "rwkv7":
        from fla.ops.rwkv7 import chunk_rwkv7  # pyright: ignore[reportMissingImports]

        return lambda: chunk_rwkv7(r=q, w=g, k=k, v=v, a=a, b=b, scale=scale)[0]
    from fla.ops.generalized_delta_rule import (  # pyright: ignore[reportMissingImports]
        chunk_dplr_delta_rule,
    )

    return lambda: chunk_dplr_delta_rule(q=q, k=k, v=v, a=a, b=b, gk=g, scale=scale)[0]


def timed(label: str, name: str, terms: LinearInputs, fwd: Callable, both: Callable) -> dict:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cold = first(fwd), first(both)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    row = {"case": label, "impl": name, "fwd_ms": bench(fwd), "fwd_bwd_ms": bench(both)}
    row |= {"floor_fwd": floor(terms, False), "floor_fwd_bwd": floor(terms, True)}
    row |= {"first_fwd_s": cold[0], "first_bwd_s": cold[1], "peak_gib": peak}
    print(label, name, *(f"{n} {x:.3f}" for n, x in row.items() if isinstance(x, float)))
    return row


def times(kind: str, with_peer: bool) -> None:
    gate = "weak" if kind == "kda" else "rwkv7"
    terms = inputs("kda" if kind == "kda" else "dplr", TIMED, gate, torch.bfloat16, state=False)
    do, scale = torch.randn_like(terms.v), 1.0 if kind == "rwkv7" else terms.q.shape[-1] ** -0.5

    def both() -> None:
        launch.forward(terms, scale, own(terms))
        launch.backward(terms, do, None, scale, own(terms))

    rows = [
        timed(kind, "slipstream", terms, lambda: launch.forward(terms, scale, own(terms)), both)
    ]
    each = {name: bench(fn) for name, fn in stages(terms, scale).items()}
    print("   ", *(f"{name} {ms:.3f}" for name, ms in each.items()), "ms", flush=True)
    if with_peer:
        fla = peer(kind, terms, scale)
        rows.append(timed(kind, "fla", terms, fla, lambda: fla().backward(do)))
    record("dplr_gpu", rows)
    record("dplr_gpu_kernels", [{"case": kind, "kernel": n, "ms": x} for n, x in each.items()])


def strong_times() -> None:
    """How much slower chunks are that decay too much to be taken whole."""
    for gate in ("middle", "strong", "mixed"):
        terms = inputs("kda", TIMED, gate, torch.bfloat16, state=False)
        each = stages(terms, 0.1)
        line = (f"{n} {bench(each[n]):.3f}" for n in ("prepare", "grads"))
        print(f"kda with {gate} gates:", *line, "ms", flush=True)


def host_time() -> None:
    terms = inputs("kda", (1, 64, 1, 1, 128, 128, None), "weak", torch.bfloat16, state=False)
    do = torch.randn_like(terms.v)
    for name, fn in (
        ("forward", lambda: launch.forward(terms, 0.1, own(terms))),
        ("backward", lambda: launch.backward(terms, do, None, 0.1, own(terms))),
    ):
        fn()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            fn()
        print(f"host {name} {(time.perf_counter() - start) * 5e3:.0f} us a call")
        torch.cuda.synchronize()


_WALKS = [(64, 4, 1), (64, 4, 2), (128, 8, 1), (128, 8, 2), (128, 8, 3)]
SWEEP = {
    "prepare": [(64, 4, 1), (64, 4, 2)],
    "walk": _WALKS,
    "keep": _WALKS,
    "back": _WALKS,
    "scores": [(64, 4, 1), (64, 4, 2), (64, 4, 3), (128, 4, 1), (128, 8, 1)],
    "grads": [(64, 4, 1), (64, 4, 2), (128, 8, 1)],
}
CANDIDATES = [(name, row) for name, rows in SWEEP.items() for row in rows]
SWEPT = ("sm_90", 2, 128)


def put(name: str, row: tuple) -> None:
    part: Any = {name: KernelTile(*row)}
    tiles.TILES[SWEPT] = dataclasses.replace(tiles.TILES[SWEPT], **part)
    triton_dplr_launch._tile.cache_clear()


def candidate(kind: str, index: int) -> None:
    """Prints how far the results with a candidate are from those with the table's tile.

    In a process of its own, which also leaves the kernel in Triton's cache.
    """
    name, row = CANDIDATES[index]
    worst = 0.0
    for size, gate in (((1, 700, 3, 3, 128, 128, None), "weak"), (PACKED, "mixed")):
        terms = inputs(kind, size, gate, torch.bfloat16, state=True)
        do, dfinal = torch.randn_like(terms.v), torch.randn(terms.state_shape, device="cuda")
        want = run_ours(kind, terms, do, dfinal, 0.1)
        kept = tiles.TILES[SWEPT]
        put(name, row)
        got = run_ours(kind, terms, do, dfinal, 0.1)
        tiles.TILES[SWEPT] = kept
        triton_dplr_launch._tile.cache_clear()
        off = [error(got[n], x) for n, x in want.items()]
        worst = max(worst, *(e if e == e else torch.inf for e in off))
    print(f"{worst:.0e}")


def sweep(kind: str, names: list[str]) -> None:
    """One kernel's tile (B, warps, stages) at a time in place of the table's: ms, difference."""
    chosen = [n for n, (name, _) in enumerate(CANDIDATES) if name in names]
    started = [start("--candidate", str(n), "--kind", kind) for n in chosen]
    off = {CANDIDATES[n]: finish(process, n) for n, process in zip(chosen, started)}
    terms = inputs(kind, TIMED, "weak", torch.bfloat16, state=False)
    kept = tiles.TILES[SWEPT]
    rows = []
    for name in names:
        line = []
        for row in SWEEP[name]:
            try:
                put(name, row)
                ms = bench(stages(terms, terms.q.shape[-1] ** -0.5)[name])
                rows.append({"case": kind, "kernel": name, "tile": row, "ms": ms})
                rows[-1]["off"] = off[name, row]
                line.append(f"{row} {ms:.3f} ({off[name, row][:30]})")
            except Exception as e:  # too much shared memory is a row too
                line.append(f"{row} {type(e).__name__}")
            tiles.TILES[SWEPT] = kept
        print(f"{kind} {name}:", ", ".join(line), flush=True)
    triton_dplr_launch._tile.cache_clear()
    record("dplr_gpu_sweep", rows)


def guarded(fn: Callable, *args: Any) -> None:
    try:
        fn(*args)
    except Exception as e:  # the other cases still count
        print(fn.__name__, *args, "failed:", str(e).strip().splitlines()[:1], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("check", "times", "sweep", "peer"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--kind", default="kda")
    parser.add_argument("--kernels", default=",".join(SWEEP))
    parser.add_argument("--group", type=int)
    parser.add_argument("--candidate", type=int)
    options = parser.parse_args()
    torch.manual_seed(time.time_ns() % 2**31)
    if options.group is not None:
        raise SystemExit(0 if check_group(options.group) else 1)
    if options.candidate is not None:
        candidate(options.kind, options.candidate)
        return
    print(torch.cuda.get_device_name(), torch.__version__)
    if options.sweep:
        for kind in ("kda", "dplr"):
            guarded(sweep, kind, options.kernels.split(","))
        return
    fine = check(options.part) if options.check or not options.times else True
    if options.times or not options.check:
        guarded(host_time)
        for kind in ("kda", "rwkv7", "dplr"):
            guarded(times, kind, options.peer)
        guarded(strong_times)
    raise SystemExit(0 if fine else "results differ from the reference")


if __name__ == "__main__":
    main()
