"""One long sequence of few heads, and the same tokens as several: what splitting it would give.

    python bench/few_heads.py            # rows go to bench/results/few_heads.csv
    python bench/few_heads.py --warm     # compiles, times nothing

B1 T32768 H8, K = V = 128, bf16. Several packed sequences are what segments would take if the states
that they begin with cost nothing; the gated delta rule is split already.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from record import record
from triton.testing import do_bench

from slipstream import ops

T, H, WIDTH = 32768, 8, 128
PARTS = (1, 8, 16)


def wide(width: int = WIDTH) -> torch.Tensor:
    return torch.randn(1, T, H, width, device="cuda", dtype=torch.bfloat16)


def unit() -> torch.Tensor:
    return F.normalize(wide().float(), dim=-1).bfloat16()


def delta(*gate: int) -> dict[str, torch.Tensor]:
    given = {"q": unit(), "k": unit(), "v": wide(), "beta": torch.rand(1, T, H, device="cuda")}
    return given | {"g": -0.1 * torch.rand(1, T, H, *gate, device="cuda")}


def rwkv7() -> dict[str, torch.Tensor]:
    a = unit()
    given = {"r": wide(), "k": wide(), "v": wide(), "a": -a, "b": a * torch.rand_like(a)}
    return given | {"w": -0.6065 * torch.rand(1, T, H, WIDTH, device="cuda")}


OPERATORS: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "gated_delta_rule": delta,
    "kda": lambda: delta(WIDTH),
    "rwkv7": rwkv7,
}


def calls(name: str, parts: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    given = OPERATORS[name]()
    live = {n: x.requires_grad_() for n, x in given.items()}
    cu = torch.arange(0, T + 1, T // parts, device="cuda", dtype=torch.int32)
    fn, do = getattr(ops, f"chunk_{name}"), wide()
    packed = {} if parts == 1 else {"cu_seqlens": cu}

    def forward() -> Any:
        with torch.no_grad():
            return fn(**given, **packed)

    def both() -> Any:
        return torch.autograd.grad(fn(**live, **packed)[0], list(live.values()), do)

    return forward, both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", action="store_true")
    warm = parser.parse_args().warm
    timed: Any = do_bench
    for name in OPERATORS:
        rows: list[dict[str, Any]] = []
        for parts in PARTS:
            row: dict[str, Any] = {"operator": name, "sequences": parts}
            for label, fn in zip(("ms", "both_ms"), calls(name, parts), strict=True):
                fn()
                if not warm:
                    took = timed(fn, warmup=10, rep=50, return_mode="median")
                    row[label] = round(took, 4)
            rows.append(row)
            print(row, flush=True)
        if not warm:
            record("few_heads", rows)


if __name__ == "__main__":
    main()
