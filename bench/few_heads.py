"""One long sequence of few heads, walked whole and in segments.

    python bench/few_heads.py            # rows go to bench/results/few_heads.csv
    python bench/few_heads.py --warm     # compiles, times nothing
    python bench/few_heads.py --kernels  # and prints us of each launch, of 8 heads

B1 T32768, K = V = 128, bf16. Forward alone goes in spans (slices.py), each of which is cut in so
many segments; forward and backward go at once. "rule" is how many segments those are given. Times
are those of the kernels alone: a call that is cut otherwise than the one before is not replayed.
"""

import argparse
from collections.abc import Callable
from itertools import product
from time import perf_counter
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from record import record

from slipstream import ops
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.segments import Segments, num_dplr_sm90, split_into_segments
from slipstream.kernels.linear.sm90.dplr import backend
from slipstream.runtime import call_replay

T, WIDTH, CHUNK = 32768, 128, 64
HEADS = (1, 2, 4, 8, 16)
SEGMENTS = (1, 2, 4, 8, 16)


def wide(H: int) -> torch.Tensor:
    return torch.randn(1, T, H, WIDTH, device="cuda", dtype=torch.bfloat16)


def unit(H: int) -> torch.Tensor:
    return F.normalize(wide(H).float(), dim=-1).bfloat16()


def gates(H: int, most: float) -> torch.Tensor:
    return -most * torch.rand(1, T, H, WIDTH, device="cuda")


def kda(H: int) -> dict[str, torch.Tensor]:
    given = {"q": unit(H), "k": unit(H), "v": wide(H), "g": gates(H, 0.1)}
    return given | {"beta": torch.rand(1, T, H, device="cuda")}


def rwkv7(H: int) -> dict[str, torch.Tensor]:
    a = unit(H)
    given = {"r": wide(H), "k": wide(H), "v": wide(H), "a": -a, "b": a * torch.rand_like(a)}
    return given | {"w": gates(H, 0.6065)}


def dplr(H: int) -> dict[str, torch.Tensor]:
    a = unit(H)
    given = {"q": unit(H), "k": unit(H), "v": wide(H), "a": a, "b": -a * torch.rand_like(a)}
    return given | {"gk": gates(H, 0.1)}


OPERATORS: dict[str, Callable[[int], dict[str, torch.Tensor]]] = {
    "kda": kda,
    "rwkv7": rwkv7,
    "dplr_delta_rule": dplr,
}


def calls(name: str, H: int) -> dict[str, Callable[[], Any]]:
    given = OPERATORS[name](H)
    live = {n: x.requires_grad_() for n, x in given.items()}
    fn, do = getattr(ops, f"chunk_{name}"), wide(H)

    def forward() -> Any:
        with torch.no_grad():
            return fn(**given)

    def both() -> Any:
        return torch.autograd.grad(fn(**live)[0], list(live.values()), do)

    return {"ms": forward, "both_ms": both}


def cut(n: int) -> Any:
    def split_of(terms: LinearInputs) -> Segments | None:
        chunks = -(-terms.v.shape[1] // CHUNK)
        return split_into_segments(terms, None if n == 1 else -(-chunks // n) * CHUNK)

    return mock.patch.object(backend.Sm90Dplr, "choose_segments", staticmethod(split_of))


def kernels(fn: Callable[[], Any]) -> str:
    """us of each of a call's launches, in their order."""
    for _ in range(3):
        fn()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fn()
        torch.cuda.synchronize()
    found = [
        x for x in profile.events() or () if x.name.endswith("_kernel") and "at::" not in x.name
    ]
    found.sort(key=lambda x: x.time_range.start)
    return " ".join(f"{x.name[:-7]} {x.device_time:.0f}" for x in found)


def device_ms(fn: Callable[[], Any], calls: int = 8) -> float:
    """What a call's kernels take, without what is between them."""
    for _ in range(2):
        fn()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()
    return sum(x.self_device_time_total for x in profile.key_averages()) / calls / 1e3


def times(name: str, H: int, fns: dict[str, Callable[[], Any]]) -> list[dict[str, Any]]:
    rule, rows = num_dplr_sm90(H, 2, T // CHUNK), []
    for n in SEGMENTS:
        row: dict[str, Any] = {"operator": name, "T": T, "heads": H, "segments": n, "rule": rule}
        with cut(n):
            for label, fn in fns.items():
                row[label] = round(device_ms(fn), 4)
        rows.append(row)
    for label in fns:
        line = " ".join(f"{row[label]:7.3f}" for row in rows)
        print(f"{name:16} {H:2} heads {label:8} {line}  rule {rule}", flush=True)
    return rows


def warm(name: str) -> None:
    for H, n in product((1, 2), (1, 8)):  # two heads go in spans, which have a state
        with cut(n):
            for label, fn in calls(name, H).items():
                begun = perf_counter()
                # held until the GPU is done: if autograd's thread is the last to let go of them
                # while the interpreter ends, the process is aborted
                made = fn()
                torch.cuda.synchronize()
                del made
                took = perf_counter() - begun
                print(f"{name} {H} heads {n} segments {label}: {took:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    args = parser.parse_args()
    call_replay.ENABLED = False  # a call that is replayed is cut as it was
    for name in OPERATORS:
        if args.warm:
            warm(name)
            continue
        for H in HEADS:
            record("few_heads", times(name, H, calls(name, H)))
        if args.kernels:
            both = calls(name, 8)["both_ms"]
            for n in (1, 8, 16):
                with cut(n):
                    print(name, n, "segments", kernels(both), flush=True)


if __name__ == "__main__":
    main()
