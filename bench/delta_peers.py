"""The gated delta rule beside FlashQLA, in one run, forward and forward with backward.

    python bench/delta_peers.py                 # the shapes of docs/performance.md
    python bench/delta_peers.py Q1 Q2           # of these names
    python bench/delta_peers.py --forward       # without backward, whose kernels compile longest
    python bench/delta_peers.py --warm Q1       # compiles, times nothing: FlashQLA takes minutes
    python bench/delta_peers.py --seconds 100   # begins no shape after so many

FlashQLA's kernels lie in TILELANG_CACHE_DIR from then on. Both take the same tensors: bf16,
K = V = 128, keys of norm 1, gates near 0, no initial state. A shape is the tokens of each sequence
and the heads of q and of v; several sequences are packed. "kernels" is the sum of the kernels'
times alone, without what is between them.
"""

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from record import record
from triton.testing import do_bench

from slipstream import ops

LENGTHS = {"2048": (2048,), "4096": (4096,), "4x8192": (8192,) * 4, "8x1024": (1024,) * 8}
HEADS = ((16, 64), (16, 32), (8, 24), (2, 8))
SHAPES = {"Q1": ((8192,), 16, 64), "Q2": ((32768,), 2, 8)} | {
    f"{name} {h}/{hv}": (lengths, h, hv) for name, lengths in LENGTHS.items() for h, hv in HEADS
}
PARTS = "ms", "both_ms"


def inputs(lengths: tuple[int, ...], H: int, HV: int) -> dict[str, Any]:
    T = sum(lengths)
    make = {"device": "cuda", "dtype": torch.bfloat16}
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    return {
        "q": F.normalize(torch.randn(1, T, H, 128, **make), dim=-1),
        "k": F.normalize(torch.randn(1, T, H, 128, **make), dim=-1),
        "v": torch.randn(1, T, HV, 128, **make),
        "g": -0.1 * torch.rand(1, T, HV, device="cuda"),
        "beta": torch.rand(1, T, HV, device="cuda"),
        "cu_seqlens": cu if len(lengths) > 1 else None,
    }


def calls(
    fn: Callable[..., Any], given: dict[str, Any], do: torch.Tensor
) -> tuple[Callable, Callable]:
    """The forward, and the forward with backward."""
    live = {n: x.clone().requires_grad_() for n, x in given.items() if n != "cu_seqlens"}

    def forward() -> Any:
        with torch.no_grad():
            return fn(**given)[0]

    def both() -> Any:
        o = fn(**live, cu_seqlens=given["cu_seqlens"])[0]
        return o, *torch.autograd.grad(o, list(live.values()), do)

    return forward, both


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return ((a - b).square().mean() / b.square().mean()).sqrt().item()


def peak(fn: Callable[[], Any]) -> int:
    """MiB that a call takes at most, results and what forward keeps with it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) >> 20


def kernels(fn: Callable[[], Any]) -> float:
    """Milliseconds that its kernels take, without what is between them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(5):
            fn()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in seen.key_averages()) / 5e3


class Pair:
    """One shape, ours and the peer's."""

    def __init__(self, name: str, providers: dict[str, Callable], forward_only: bool) -> None:
        given = inputs(*SHAPES[name])
        do = torch.randn_like(given["v"])
        self.row: dict[str, Any] = {"shape": name}
        first: list[torch.Tensor] = []
        self.fns: dict[str, tuple[Callable, ...]] = {}
        for who, fn in providers.items():
            start = time.perf_counter()
            try:
                forward, both = calls(fn, given, do)
                made = [forward()] if forward_only else [forward(), *both()[1:]]
                torch.cuda.synchronize()
                self.row[f"{who}_first_s"] = round(time.perf_counter() - start, 2)
                if first:
                    apart = (off(a, b) for a, b in zip(first, made, strict=True))
                    self.row[f"{who}_off"] = " ".join(f"{x:.0e}" for x in apart)
                first = first or made
                del made
                self.fns[who] = (forward,) if forward_only else (forward, both)
                self.row[f"{who}_peak_mib"] = peak(self.fns[who][-1])
            except Exception as e:
                self.row[who] = f"{type(e).__name__}: {' '.join(str(e).split())[:120]}"

    def times(self) -> dict[str, Any]:
        timed: Any = do_bench
        for who, fns in self.fns.items():
            for part, fn in zip(PARTS, fns, strict=False):
                took = timed(fn, warmup=10, rep=50, return_mode="median")
                self.row[f"{who}_{part}"] = round(took, 4)
            self.row[f"{who}_kernels_ms"] = " ".join(f"{kernels(f):.4f}" for f in fns)
        if len(self.fns) == 2:
            for part in PARTS:
                if f"slipstream_{part}" in self.row:
                    share = self.row[f"slipstream_{part}"] / self.row[f"flash_qla_{part}"]
                    self.row[f"{part}_of_peer"] = round(share, 3)
            record("delta_peers", [self.row])
        return self.row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--forward", action="store_true", help="nothing of backward")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    start = time.perf_counter()
    import flash_qla  # pyright: ignore[reportMissingImports]

    providers = {
        "slipstream": ops.chunk_gated_delta_rule,
        "flash_qla": flash_qla.chunk_gated_delta_rule,
    }
    for name in options.names or SHAPES:
        if time.perf_counter() - start > options.seconds:
            print(f"{name}: no time left")
            continue
        gc.collect()
        torch.cuda.empty_cache()
        try:
            pair = Pair(name, providers, options.forward)
            row = pair.row if options.warm else pair.times()
        except torch.OutOfMemoryError as e:  # others' may be in the way
            row = {"shape": name, "failed": str(e)[:120]}
        took = time.perf_counter() - start
        print(", ".join(f"{k} {v}" for k, v in row.items()), f"after {took:.0f} s", flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main()
