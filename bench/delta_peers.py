"""The gated delta rule beside FlashQLA, in one run, forward and forward with backward.

    python bench/delta_peers.py                 # the shapes of docs/performance.md
    python bench/delta_peers.py Q1 Q2           # of these names
    python bench/delta_peers.py --forward       # without backward, whose kernels compile longest
    python bench/delta_peers.py --warm Q1       # compiles, times nothing: FlashQLA takes minutes
    python bench/delta_peers.py --part states Q1   # compiles one of its kernels of backward
    python bench/delta_peers.py --wait go Q1 Q2    # all but the timing; that once a file is there

FlashQLA's kernels compile one after the other; those of backward need nothing of the others, so
that --part compiles them beside --warm, with the same TILELANG_CACHE_DIR. Both take the same
tensors: bf16, K = V = 128, keys of norm 1, gates near 0, no initial state. A shape is the tokens of
each sequence and the heads of q and of v; several sequences are packed.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
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


def compile_part(part: str, given: dict[str, Any]) -> None:
    """The kernel of backward that makes all states, or the one that makes the gradients.

    The numbers are of no account.
    """
    from flash_qla.ops.gated_delta_rule import chunk  # pyright: ignore[reportMissingImports]

    k, v, g, beta = (given[name] for name in ("k", "v", "g", "beta"))
    T, HV = v.shape[1:3]
    cu = given["cu_seqlens"]
    cu = torch.tensor([0, T], device="cuda", dtype=torch.int32) if cu is None else cu
    cp = chunk._auto_intra_cp_context(k, v, cu, 64, True, True)
    met = None
    if cp.is_intra:
        cu = cp.intra_cp_cu_seqlens
        met = v.new_zeros(cu.numel() - 1, HV, 128, 128, dtype=torch.float32)
    same = {"k": k, "v": v, "g": g, "b": beta, "cu_seqlens": cu}
    same["a"] = v.new_zeros(1, T, HV, 64)
    if part == "states":
        chunk.fused_gdr_h(**same, initial_state=met, output_final_state=False, output_h=True)
    else:
        h = v.new_zeros(1, T // 64 + cu.numel(), HV, 128, 128)
        scale = 128**-0.5
        chunk.fused_gdr_bwd(q=given["q"], **same, do=v, dht=met, h=h, scale=scale)
    torch.cuda.synchronize()


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
                took = timed(fn, warmup=10, rep=40, return_mode="median")
                self.row[f"{who}_{part}"] = round(took, 4)
            if self.row["shape"] in ("Q1", "Q2"):
                self.row[f"{who}_kernels_ms"] = " ".join(f"{kernels(f):.4f}" for f in fns)
        for part in PARTS if len(self.fns) == 2 else ():
            if f"slipstream_{part}" in self.row:
                share = self.row[f"slipstream_{part}"] / self.row[f"flash_qla_{part}"]
                self.row[f"{part}_of_peer"] = round(share, 3)
        if len(self.fns) == 2:
            record("delta_peers", [self.row])
        return self.row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--forward", action="store_true", help="nothing of backward")
    parser.add_argument("--part", choices=("states", "grads"))
    parser.add_argument("--wait", type=Path, help="times nothing before this file is there")
    options = parser.parse_args()
    import flash_qla  # pyright: ignore[reportMissingImports]

    names = options.names or list(SHAPES)
    if options.part:
        for name in names:
            start = time.perf_counter()
            compile_part(options.part, inputs(*SHAPES[name]))
            print(f"{name} {options.part} in {time.perf_counter() - start:.1f} s", flush=True)
        return
    providers = {
        "slipstream": ops.chunk_gated_delta_rule,
        "flash_qla": flash_qla.chunk_gated_delta_rule,
    }
    pairs: dict[str, Pair] = {}
    for name in names:
        torch.cuda.empty_cache()
        if options.warm or (options.wait and not options.wait.exists()):
            try:
                pairs[name] = Pair(name, providers, options.forward)
                print(pairs[name].row, flush=True)
            except torch.OutOfMemoryError as e:  # others' may be in the way
                print(f"{name}: {e}"[:120], flush=True)
    if options.warm:
        return
    while options.wait and not options.wait.exists():
        time.sleep(0.05)
    for name in list(pairs) if options.wait else names:
        row = (pairs.pop(name, None) or Pair(name, providers, options.forward)).times()
        print(", ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main()
