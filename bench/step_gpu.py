"""Decoding, fused_recurrent and hgrn's scan on a GPU: right at odd sizes, then how fast.

python bench/step_gpu.py            # everything but peers and sweeps
python bench/step_gpu.py --check    # only the comparison with the float64 reference
python bench/step_gpu.py --times    # only the times; --peer adds fla-core's
python bench/step_gpu.py --sweep    # tiles of the step, segments of the scan
"""

import argparse
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import scan_gpu
import torch
import torch.nn.functional as F
from scan_gpu import bench, error, first, row
from torch import Tensor

from slipstream import ops
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.op import linear
from slipstream.kernels.linear.reference import linear_reference
from slipstream.ops.recurrent_step import recurrent_step
from slipstream.runtime import call_replay

KINDS = {
    "linear_attn": (),
    "retention": ("head",),
    "gla": ("gk", "gv"),
    "rwkv6": ("gk", "u"),
    "gated_delta_rule": ("g", "beta"),
    "kda": ("gk", "beta"),
    "comba": ("g", "beta", "p"),
    "rwkv7": ("gk", "a", "b"),
    "all": ("gk", "gv", "columns", "p", "a", "b", "u"),
}
LIMITS = {torch.float32: 5e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}
# B, T, H, HV, K, V, lengths of packed sequences
ODD = [
    (3, 1, 2, 4, 20, 33, None),
    (2, 3, 1, 1, 128, 128, None),
    (1, 64, 2, 4, 100, 40, None),
    (1, 17, 2, 2, 256, 192, None),
    (1, 24, 1, 2, 64, 64, (5, 0, 17, 1, 1)),
]
DECODING = [  # operator, B, H, HV, state V-first
    ("gated_delta_rule", 1, 16, 32, False),
    ("gated_delta_rule", 8, 16, 32, False),
    ("gated_delta_rule", 64, 16, 32, False),
    ("gated_delta_rule", 256, 16, 32, False),
    ("gated_delta_rule", 64, 16, 32, True),
    ("gated_delta_rule", 256, 16, 32, True),
    ("kda", 64, 32, 32, False),
    ("rwkv7", 64, 32, 32, False),
    ("retention", 64, 16, 16, False),
]


def inputs(kind: str, size: tuple, dtype: torch.dtype, state: bool = True) -> LinearInputs:
    B, T, H, HV, K, V, lengths = size
    N = B if lengths is None else len(lengths)
    make: dict[str, Any] = {"device": "cuda"}

    def unit() -> Tensor:
        return F.normalize(torch.randn(B, T, H, K, **make), dim=-1).to(dtype)

    def gate(*shape: int) -> Tensor:
        x = torch.rand(*shape, **make)
        return -torch.where(torch.rand_like(x) < 0.1, 50 * x, 0.1 * x)

    a = unit()
    made = {
        "head": lambda: ("g", -torch.rand(HV, **make).expand(B, T, HV)),
        "g": lambda: ("g", gate(B, T, HV)),
        "gk": lambda: ("g", gate(B, T, HV, K)),
        "gv": lambda: ("gv", gate(B, T, HV, V)),
        "beta": lambda: ("beta", torch.rand(B, T, HV, **make)),
        "columns": lambda: ("beta", torch.rand(B, T, HV, V, **make)),
        "p": lambda: ("p", unit()),
        "a": lambda: ("a", a),
        "b": lambda: ("b", -0.5 * a),
        "u": lambda: ("u", torch.randn(HV, K, **make)),
    }
    cu = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    return LinearInputs(
        unit(),
        unit(),
        torch.randn(B, T, HV, V, **make).to(dtype),
        **dict(made[x]() for x in KINDS[kind]),
        initial_state=torch.randn(N, HV, K, V, **make) if state else None,
        cu_seqlens=cu,
    )


def double(terms: LinearInputs) -> LinearInputs:
    wide: Any = (x.double() if x is not None and x.is_floating_point() else x for x in terms)
    return LinearInputs(*wide)


def step(terms: LinearInputs, state: Tensor, **options: Any) -> Tensor:
    given = terms._asdict()
    given.pop("initial_state")
    return recurrent_step(**given, state=state, **options)


def compare_forward(kind: str, size: tuple, dtype: torch.dtype) -> list[float]:
    """Errors of o and the state; nan if a second run gives other bits."""
    terms = inputs(kind, size, dtype)
    with torch.no_grad():
        got, again = (linear(terms, 0.1, 0, "triton") for _ in range(2))
    want = linear_reference(double(terms), 0.1)
    same = all(torch.equal(x, y) for x, y in zip(got, again))
    return [error(x, y) if same else float("nan") for x, y in zip(got, want)]


def compare_pool(kind: str, size: tuple, dtype: torch.dtype, v_first: bool) -> list[float]:
    terms = inputs(kind, size, dtype, state=False)
    N, HV, K, V = terms.state_shape
    pool = torch.randn(N + 4, HV, K, V, device="cuda")
    at = torch.randperm(N + 4, device="cuda")[:N].int()
    if N > 1:
        at[0] = -1
    live = at >= 0
    start = pool[at.long().clamp(min=0)].double()
    o, final = linear_reference(double(terms)._replace(initial_state=start), 0.1)
    owner = torch.arange(N, device="cuda").repeat_interleave(
        torch.full_like(at, o.shape[1]) if terms.cu_seqlens is None else terms.cu_seqlens.diff()
    )
    o = torch.where(live[owner].view(*o.shape[:2], 1, 1), o, 0)
    want = pool.double()
    want[at[live].long()] = final[live]
    state = pool.mT.contiguous() if v_first else pool
    got = step(terms, state, state_indices=at, scale=0.1, state_v_first=v_first)
    return [error(got, o), error(state.mT if v_first else state, want)]


def cases() -> Iterator[tuple[str, torch.dtype, float, Callable[[], list[float]]]]:
    names = list(KINDS)
    for d, (dtype, limit) in enumerate(LIMITS.items()):
        for i, size in enumerate(ODD):
            for kind in {names[(2 * i + 3 * d) % len(names)], names[(2 * i + d + 1) % len(names)]}:
                fn = partial(compare_forward, kind, size, dtype)
                yield f"forward {kind} {size}", dtype, limit, fn
            kind, v_first = names[(i + d) % len(names)], i % 2 == d % 2
            fn = partial(compare_pool, kind, size, dtype, v_first)
            yield f"pool {kind} {size}", dtype, limit, fn
        for size in scan_gpu.ODD:
            yield f"scan {size}", dtype, 2 * limit, partial(scan_gpu.compare, size, dtype)


def check() -> bool:
    """One line a part and dtype: the worst errors; and one for each case that fails."""
    worst: dict[tuple[str, str], float] = {}
    fine = True
    for label, dtype, limit, fn in cases():
        try:
            errors = fn()
        except Exception as e:
            print(f"{label} {dtype}: {type(e).__name__}: {str(e)[:150]}", flush=True)
            fine = False
            continue
        if not max(errors) <= limit or any(e != e for e in errors):
            fine = False
            print(f"{label} {dtype} WRONG:", ", ".join(f"{e:.1e}" for e in errors), flush=True)
        key = (label.split()[0], str(dtype)[6:])
        worst[key] = max(worst.get(key, 0.0), *errors)
    for (part, dtype), e in worst.items():
        print(f"check {part:8} {dtype:9} worst {e:.1e}")
    return fine


def in_graph(fn: Callable[[], Any]) -> float:
    """Without the host's time, and with what the L2 cache holds from the run before."""
    from triton.testing import do_bench_cudagraph

    timed: Any = do_bench_cudagraph
    return timed(fn, rep=20, return_mode="median")


def host(fn: Callable[[], Any], calls: int = 200) -> float:
    """Microseconds a call that the device keeps up with."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return best


def decode(kind: str, B: int, H: int, HV: int, v_first: bool) -> Callable[[], Any]:
    terms = inputs(kind, (B, 1, H, HV, 128, 128, None), torch.bfloat16, state=False)
    pool = torch.randn(B + 3, HV, 128, 128, device="cuda")
    at = torch.randperm(B + 3, device="cuda")[:B].int()
    return lambda: step(terms, pool, state_indices=at, state_v_first=v_first)


def time_decoding() -> None:
    with torch.no_grad():
        for kind, B, H, HV, v_first in DECODING:
            fn = decode(kind, B, H, HV, v_first)
            cold = first(fn)
            bytes_moved = 2.0 * B * HV * 128 * 128 * 4
            shape = f"B{B} H{H} HV{HV}" + (" V first" if v_first else "")
            line = row(f"step {kind}", shape, in_graph(fn), bytes_moved, cold)
            flushed = f"; L2 flushed {bench(fn) * 1e3:.1f} us" if B >= 64 else ""
            print(line + flushed, flush=True)


def time_host() -> None:
    with torch.no_grad():
        terms = inputs("gated_delta_rule", (1, 1, 16, 32, 128, 128, None), torch.bfloat16)
        q, k, v, g, beta, state = *terms[:4], terms.beta, terms.initial_state
        pool, at = torch.zeros(4, 32, 128, 128, device="cuda"), torch.tensor([2], device="cuda")

        def fused() -> Any:
            return ops.fused_recurrent_gated_delta_rule(
                q,
                k,
                v,
                g,
                beta=beta,
                initial_state=state,
                output_final_state=True,
                impl="triton",
            )

        from slipstream.kernels.linear.triton import decode_launch

        calls = {
            "recurrent_step": lambda: step(terms, pool, state_indices=at),
            "fused_recurrent_gated_delta_rule": fused,
            "its launch alone": lambda: decode_launch.update(terms, pool, at, 0.1, False),
        }
        for name, fn in calls.items():
            cold = first(fn)
            print(f"host {name}: {host(fn):.1f} us a call, first {cold:.2f} s", flush=True)


def time_boundary() -> None:
    """Where stepping stops being faster than chunks: what op.STEP_TOKENS should be."""
    for kind in ("gated_delta_rule", "retention", "kda"):
        line = [f"T{T} {_boundary(kind, T)}" for T in (16, 32, 64, 128, 256)]
        print(f"{kind}, us step / chunks:", ", ".join(line), flush=True)


def _boundary(kind: str, T: int) -> str:
    from slipstream.kernels.linear.triton import decode_launch

    terms = inputs(kind, (1, T, 16, 32, 128, 128, None), torch.bfloat16)
    stepped = in_graph(lambda: decode_launch.forward(terms, 0.1)) * 1e3
    try:
        walked = in_graph(lambda: linear(terms, 0.1, 64, "triton")) * 1e3
    except Exception as e:
        return f"{stepped:.0f} / {type(e).__name__}"
    return f"{stepped:.0f} / {walked:.0f}"


def time_peers() -> None:
    for B in (1, 64, 256):
        try:
            _time_peer(B)
        except Exception as e:
            print(f"fla step B{B}: {type(e).__name__}: {str(e)[:100]}", flush=True)
    hgrn = importlib.import_module("fla.ops.hgrn")
    for name in ("fused_recurrent_hgrn", "chunk_hgrn"):
        scan_gpu.times(f"fla {name}", getattr(hgrn, name))


def _time_peer(B: int) -> None:
    module = importlib.import_module("fla.ops.gated_delta_rule")
    terms = inputs("gated_delta_rule", (B, 1, 16, 32, 128, 128, None), torch.bfloat16)
    q, k, v, g = terms[:4]
    options = {"initial_state": terms.initial_state, "output_final_state": True, "scale": 0.1}

    def fn() -> Any:
        return module.fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=terms.beta, **options)

    with torch.no_grad():
        cold = first(fn)
        moved = 2.0 * B * 32 * 128 * 128 * 4
        line = row("fla step gated_delta_rule", f"B{B} H16 HV32", in_graph(fn), moved, cold)
        print(f"{line}; L2 flushed {bench(fn) * 1e3:.1f} us, host {host(fn):.0f} us", flush=True)


def sweep() -> None:
    from slipstream.kernels.linear.triton import decode_launch

    call_replay.ENABLED = False  # a record of a call keeps the tile that it had
    kept = decode_launch.TILES[128]
    for B, v_first in ((1, False), (64, False), (64, True)):
        fn, line = decode("gated_delta_rule", B, 16, 32, v_first), []
        for tile in ((16, 2), (16, 4), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8), (128, 16)):
            decode_launch.TILES[128] = decode_launch.DecodeTile(*tile)
            with torch.no_grad():
                line.append(f"{tile} {in_graph(fn) * 1e3:.1f}")
        print(f"step B{B} V first {v_first}:", ", ".join(line), "us", flush=True)
    decode_launch.TILES[128] = kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("check", "times", "peer", "sweep"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(int(time.time()))
    print(torch.cuda.get_device_name(), torch.__version__)
    if options.sweep:
        return sweep()
    fine = options.times or check()
    if not options.check:
        # first calls compile
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
        parts = [time_decoding, time_host, time_boundary]
        parts += [lambda: scan_gpu.times("hgrn", ops.chunk_hgrn)]
        parts += [time_peers] if options.peer else []
        for part in parts:
            try:
                part()
            except Exception as e:
                print(f"{type(e).__name__}: {str(e)[:200]}", flush=True)
        scan_gpu.save()
    raise SystemExit(0 if fine else "results differ from the reference")


if __name__ == "__main__":
    main()
