"""The delta rule, plain and gated, on a GPU: right at odd sizes, then how fast.

python bench/delta_gpu.py            # everything
python bench/delta_gpu.py --check    # only the comparison with the float64 reference
python bench/delta_gpu.py --times    # only the times, and those of each kernel
python bench/delta_gpu.py --peer     # the times, and fla-core's
python bench/delta_gpu.py --part 2/8 # the third of eight parts of the check

What the tiles' table holds is found by bench/tune.py.
"""

import argparse
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from record import record
from torch import Tensor

from slipstream import ops
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from slipstream.kernels.linear.triton.delta import backend as launch
from slipstream.kernels.linear.triton.delta import plan

COPY_BYTES_PER_MS = 4.28e9  # device copy on an H200
# B, T, H, HV, K, V, lengths, gate
SHAPES = {
    "delta_rule A": (1, 8192, 96, 96, 128, 128, None, "none"),
    "gated_delta_rule Q1": (1, 8192, 16, 64, 128, 128, None, "weak"),
    "gated_delta_rule Q2": (1, 32768, 2, 8, 128, 128, None, "weak"),
    "gated_delta_rule H4": (1, 32768, 4, 4, 128, 128, None, "weak"),
    "comba A": (1, 8192, 96, 96, 128, 128, None, "weak"),
}
# of outputs, of gradients, of those of g and beta
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
    (1, 1500, 1, 1, 64, 128, None),
    (1, 90, 128, 128, 64, 64, None),
    # the tiles of many programs
    (1, 100, 140, 140, 128, 128, None),
    # split
    (1, 4500, 1, 2, 128, 128, None),
    (1, 4600, 1, 1, 64, 64, (5, 0, 4400, 195)),
]
GATES = ("none", "weak", "mixed", "reset")


def inputs(size: tuple, gate: str, dtype: torch.dtype, has_p: bool, state: bool) -> LinearInputs:
    """Keys of norm 1 and beta from 0 to 2."""
    B, T, H, HV, K, V, lengths = size
    N = B if lengths is None else len(lengths)
    make = {"device": "cuda", "dtype": dtype}
    x = torch.rand(B, T, HV, device="cuda")
    g = {
        "none": None,
        "weak": -0.1 * x,
        "mixed": -torch.where(torch.rand_like(x) < 0.2, 50 * x, 0.1 * x),
        "reset": torch.where(x < 0.1, -torch.inf, -0.1 * x),
    }[gate]
    cu = None
    if lengths is not None:
        cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    k = F.normalize(torch.randn(B, T, H, K, **make), dim=-1)
    return LinearInputs(
        torch.randn(B, T, H, K, **make),
        k,
        torch.randn(B, T, HV, V, **make),
        g=g,
        beta=2 * torch.rand(B, T, HV, device="cuda"),
        p=(0.8 * k + 0.1 * torch.randn_like(k)) if has_p else None,
        initial_state=torch.randn(N, HV, K, V, device="cuda") if state else None,
        cu_seqlens=cu,
    )


def error(got: Tensor, want: Tensor) -> float:
    size = want.double().square().mean().sqrt().item()
    off = (got.double() - want.double()).square().mean().sqrt().item()
    return off / size if size > 1e-30 else off  # gates may leave less than float32 holds


def oracle(terms: LinearInputs, scale: float) -> tuple[Tensor, Tensor]:
    """The float64 oracle; for long sequences the chunkwise torch path, itself tested against it."""
    if terms.q.shape[1] * terms.v.shape[2] <= 400:
        return linear_reference(terms, scale)
    from slipstream.kernels.linear.op import linear

    return linear(terms, scale, 64, "eager")


def compare(size: tuple, dtype: torch.dtype, gate: str, has_p: bool, state: bool) -> dict:
    terms = inputs(size, gate, dtype, has_p, state)
    scale = terms.q.shape[-1] ** -0.5
    do = torch.randn_like(terms.v)
    dfinal = torch.randn(terms.state_shape, device="cuda") if state else None
    o, final = launch.forward(terms, scale)
    got = {"o": o, "final": final, **launch.backward(terms, do, dfinal, scale)}
    o, final = launch.forward(terms, scale)
    again = {"o": o, "final": final, **launch.backward(terms, do, dfinal, scale)}
    same = all(torch.equal(got[n], again[n]) for n in got)
    wide = {
        n: x.detach().cpu().double().requires_grad_()
        for n, x in terms._asdict().items()
        if x is not None and n != "cu_seqlens"
    }
    cu = None if terms.cu_seqlens is None else terms.cu_seqlens.cpu()
    o, final = oracle(LinearInputs(**wide, cu_seqlens=cu), scale)
    loss = (o * do.cpu().double()).sum()
    if dfinal is not None:
        loss = loss + (final * dfinal.cpu().double()).sum()
    grads = torch.autograd.grad(loss, list(wide.values()))
    want = {"o": o.detach(), "final": final.detach(), **dict(zip(wide, grads))}
    return {n: error(got[n].cpu(), want[n]) if same else float("nan") for n in got}


def check(part: int, parts: int) -> bool:
    """One line a dtype and gate: the worst error of each result; nan if two runs differ."""
    fine = True
    cases = [(dtype, gate) for dtype in LIMITS for gate in GATES]
    for dtype, gate in cases[part::parts]:
        limits = LIMITS[dtype]
        worst: dict[str, tuple[float, tuple]] = {}
        for i, size in enumerate(ODD):
            if dtype == torch.float16 and i % 2:
                continue
            try:
                found = compare(size, dtype, gate, has_p=i % 3 == 0, state=i % 2 == 0)
            except Exception as e:
                print(f"{dtype} {gate} {size}: {type(e).__name__}: {str(e)[:150]}", flush=True)
                fine = False
                continue
            for name, e in found.items():
                if not e <= worst.get(name, (-1.0, ()))[0]:
                    worst[name] = (e, size)
        line = []
        for name, (e, size) in worst.items():
            limit = limits[{"o": 0, "final": 0, "g": 2, "beta": 2}.get(name, 1)]
            ok = e <= limit
            fine &= ok
            line.append(f"{name} {e:.1e}" + ("" if ok else f" WRONG at {size}"))
        print(f"{str(dtype)[6:]:9} {gate:6}", ", ".join(line), flush=True)
    return fine


def floor(terms: LinearInputs, backward: bool) -> float:
    """ms: each input read and each output written once."""
    qk, v = (x.numel() * x.element_size() for x in (terms.q, terms.v))
    small = sum(x.numel() * 4 for x in (terms.g, terms.beta) if x is not None)
    forward = 2 * qk + 2 * v + small
    return (forward + (4 * qk + 3 * v + 2 * small if backward else 0)) / COPY_BYTES_PER_MS


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
    terms = launch._prepare(terms)
    do, solved, split = (
        torch.randn_like(terms.v),
        launch._solve_tril(terms),
        plan.choose_split(terms),
    )
    o, w, dv = (torch.empty_like(do) for _ in range(3))
    final = do.new_empty(terms.state_shape, dtype=torch.float32)
    S, dS = plan.states_like(terms), plan.states_like(terms)
    met: Tensor | None = None
    found: dict[str, Callable[[], Any]] = {"solve": lambda: launch._solve_tril(terms)}
    options: dict[str, Any] = {"split": split, "s_out": final if split is None else None}
    if split is not None:
        E, M = launch._segment_transition(terms, solved, split)
        met = torch.zeros_like(E)
        found["ends"] = lambda: launch._segment_transition(terms, solved, split)
        found["join"] = lambda: launch.state_passing(terms, split, E, M, None, final)
        found["back ends"] = lambda: launch._chunk_dstate(
            terms, do, solved, scale, s_out=E, split=split
        )
    return found | {
        "walk": lambda: launch.launch_chunk_fwd(terms, solved, scale, o, s_in=met, **options),
        "keep": lambda: launch.launch_chunk_fwd(
            terms, solved, scale, w, states=S, s_in=met, split=split
        ),
        "back": lambda: launch._chunk_dstate(terms, do, solved, scale, dv, dS, met, split=split),
        "grads": lambda: launch._chunk_dqkg(terms, do, solved.rows, w, dv, S, dS, scale),
    }


def times(label: str) -> dict[str, object]:
    size, gate = SHAPES[label][:-1], str(SHAPES[label][-1])
    terms = inputs(size, gate, torch.bfloat16, has_p="comba" in label, state=False)
    do, scale = torch.randn_like(terms.v), terms.q.shape[-1] ** -0.5

    def fwd() -> Any:
        return launch.forward(terms, scale)

    def both() -> None:
        fwd()
        launch.backward(terms, do, None, scale)

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cold = first(fwd), first(both)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    f, fb = bench(fwd), bench(both)
    ff, fbf = floor(terms, False), floor(terms, True)
    print(
        f"{label}: fwd {f:.3f} ms x{f / ff:.1f} of floor, bwd {fb - f:.3f}, "
        f"fwd+bwd {fb:.3f} x{fb / fbf:.1f}; first {cold[0]:.2f} + {cold[1]:.2f} s; "
        f"peak {peak:.2f} GiB",
        flush=True,
    )
    each = {name: round(bench(fn), 4) for name, fn in stages(terms, scale).items()}
    print("   ", ", ".join(f"{name} {ms:.3f}" for name, ms in each.items()), "ms", flush=True)
    return {
        "shape": label,
        "forward_ms": round(f, 4),
        "both_ms": round(fb, 4),
        "first_s": round(sum(cold), 2),
        "peak_GiB": round(peak, 2),
        **{f"{name.replace(' ', '_')}_ms": ms for name, ms in each.items()},
    }


def delta_product() -> dict[str, object]:
    """Two Householder steps a token: twice the keys of shape C with a quarter of the tokens."""
    B, T, H, D = 1, 8192, 32, 128
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k = (F.normalize(torch.randn(B, n * T, H, D, **make), dim=-1) for n in (1, 2))
    v = torch.randn(B, 2 * T, H, D, **make)
    g, beta = -0.1 * torch.rand(B, T, H, device="cuda"), torch.rand(B, 2 * T, H, device="cuda")
    given = [x.requires_grad_() for x in (q, k, v, g, beta)]
    do = torch.randn(B, T, H, D, **make)

    def both() -> Any:
        o, _ = ops.chunk_gated_delta_product(q, k, v, g, beta, 2, impl="triton")
        return torch.autograd.grad(o, given, do)

    def fwd() -> Any:
        with torch.no_grad():
            return ops.chunk_gated_delta_product(q, k, v, g, beta, 2, impl="triton")

    cold, ms, ms_both = first(both), bench(fwd), bench(both)
    name = f"gated_delta_product B{B} T{T} x 2 H{H} D{D}"
    print(f"{name}: fwd {ms:.3f} ms, fwd+bwd {ms_both:.3f}; first {cold:.2f} s", flush=True)
    row = {"shape": name, "forward_ms": round(ms, 4), "both_ms": round(ms_both, 4)}
    return {**row, "first_s": round(cold, 2)}


def peer(label: str) -> dict[str, object]:
    """fla-core's operator at the same inputs."""
    name = label.split()[0]
    fn = getattr(importlib.import_module(f"fla.ops.{name}"), f"chunk_{name}")
    size, gate = SHAPES[label][:-1], str(SHAPES[label][-1])
    terms = inputs(size, gate, torch.bfloat16, has_p=name == "comba", state=False)
    assert terms.beta is not None
    given = {"q": terms.q, "k": terms.k, "v": terms.v, "beta": terms.beta.bfloat16()}
    given |= {n: x for n, x in (("g", terms.g), ("p", terms.p)) if x is not None}
    leaves = [x.requires_grad_() for x in given.values()]
    do = torch.randn_like(terms.v)

    def both() -> Any:
        return torch.autograd.grad(fn(**given)[0], leaves, do)

    def fwd() -> Any:
        with torch.no_grad():
            return fn(**given)

    cold, ms, ms_both = first(both), bench(fwd), bench(both)
    print(f"fla {label}: fwd {ms:.3f} ms, fwd+bwd {ms_both:.3f}; first {cold:.1f} s", flush=True)
    row = {"shape": f"fla {label}", "forward_ms": round(ms, 4), "both_ms": round(ms_both, 4)}
    return {**row, "first_s": round(cold, 1)}


def attempt(fn: Callable[..., dict[str, object]], *given: str) -> list[dict[str, object]]:
    try:
        return [fn(*given)]
    except Exception as e:
        print(f"{fn.__name__} {given}: {type(e).__name__}: {str(e)[:150]}", flush=True)
        return []


def host_time() -> None:
    terms = inputs((1, 64, 1, 1, 64, 64, None), "weak", torch.bfloat16, has_p=False, state=False)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("check", "times", "peer"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--part", default="0/1", help="of the check's cases, such as 2/8")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    timed_alone = options.times or options.peer
    fine = timed_alone or check(*map(int, options.part.split("/")))
    if not options.check:
        host_time()
        rows = [row for label in SHAPES for row in attempt(times, label)]
        rows += attempt(delta_product)
        if options.peer:
            rows += [row for label in SHAPES for row in attempt(peer, label)]
        print("recorded in", record("delta_gpu_times", rows))
    raise SystemExit(0 if fine else "results differ from the reference")


if __name__ == "__main__":
    main()
