"""The gated delta rule beside FlashQLA, in one run, forward and forward with backward.

    python bench/delta_peers.py                 # the shapes of docs/performance.md
    python bench/delta_peers.py Q1 Q2           # of these names
    python bench/delta_peers.py --warm Q1       # compiles, times nothing: FlashQLA takes a minute

Both take the same tensors: bf16, K = V = 128, keys of norm 1, gates near 0, no initial state. A
shape is the tokens of each sequence and the heads of q and of v; several sequences are packed.
"""

import argparse
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


def inputs(lengths: tuple[int, ...], H: int, HV: int) -> dict[str, Any]:
    T = sum(lengths)
    make = {"device": "cuda", "dtype": torch.bfloat16}
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    return {
        "q": F.normalize(torch.randn(1, T, H, 128, **make), dim=-1),
        "k": F.normalize(torch.randn(1, T, H, 128, **make), dim=-1),
        "v": torch.randn(1, T, HV, 128, **make),
        "g": -0.1 * torch.rand(1, T, HV, device="cuda"),
        "beta": torch.rand(1, T, HV, device="cuda"),
        "cu_seqlens": cu if len(lengths) > 1 else None,
    }


def calls(fn: Callable[..., Any], given: dict[str, Any]) -> tuple[Callable, Callable]:
    """The forward, and the forward with backward."""
    live = {n: x.clone().requires_grad_() for n, x in given.items() if n != "cu_seqlens"}
    do = torch.randn_like(given["v"])

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--warm", action="store_true")
    options = parser.parse_args()
    import flash_qla  # pyright: ignore[reportMissingImports]

    timed: Any = do_bench
    providers = {
        "slipstream": ops.chunk_gated_delta_rule,
        "flash_qla": flash_qla.chunk_gated_delta_rule,
    }
    for name in options.names or SHAPES:
        given, made = inputs(*SHAPES[name]), []
        row: dict[str, Any] = {"shape": name}
        for who, fn in providers.items():
            start = time.perf_counter()
            try:
                pair = calls(fn, given)
                made.append([pair[0](), *pair[1]()[1:]])
                torch.cuda.synchronize()
                row[f"{who}_first_s"] = round(time.perf_counter() - start, 2)
                if not options.warm:
                    fwd, both = (timed(f, warmup=10, rep=50, return_mode="median") for f in pair)
                    row |= {f"{who}_ms": round(fwd, 4), f"{who}_both_ms": round(both, 4)}
            except Exception as e:
                row[who] = f"{type(e).__name__}: {' '.join(str(e).split())[:120]}"
        if len(made) == 2:
            row["apart"] = " ".join(f"{off(a, b):.0e}" for a, b in zip(*made, strict=True))
        if "slipstream_ms" in row and "flash_qla_ms" in row:
            row["of_peer"] = round(row["slipstream_ms"] / row["flash_qla_ms"], 3)
            row["of_peer_both"] = round(row["slipstream_both_ms"] / row["flash_qla_both_ms"], 3)
            record("delta_peers", [row])
        print(", ".join(f"{k} {v}" for k, v in row.items()), flush=True)


if __name__ == "__main__":
    main()
