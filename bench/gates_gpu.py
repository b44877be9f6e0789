"""The gates' gradient where some gates are -inf: by operator, the worst of several seeds.

    python bench/gates_gpu.py [SEEDS]

T 128 and 200, bf16, against float64. Wanted: 2e-2.
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F

from slipstream import ops

ROWS = {
    "chunk_simple_gla": ("sm90", "triton"),
    "chunk_gla": (None, "triton"),
    "chunk_gated_delta_rule": ("sm90", "triton"),
    "chunk_kda": ("sm90", "triton"),
}


def inputs(op: str, T: int, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    wide = op in ("chunk_gla", "chunk_kda")
    x = torch.rand(1, T, 2, *((128,) if wide else ()), device="cuda")
    given = {
        "q": torch.randn(1, T, 2, 128, **make),
        "k": F.normalize(torch.randn(1, T, 2, 128, **make), dim=-1),
        "v": torch.randn(1, T, 2, 128, **make),
        "g": torch.where(x < 0.1, -torch.inf, -x),
    }
    if "gla" not in op:
        given["beta"] = torch.rand(1, T, 2, **make)
    return given


def gradient(op: str, given: dict[str, torch.Tensor], impl: str | None) -> torch.Tensor:
    leaves = {n: x.detach().requires_grad_() for n, x in given.items()}
    o = getattr(ops, op)(**leaves, impl=impl)[0]
    torch.manual_seed(9)
    do = torch.randn(o.shape, device="cuda").bfloat16().to(o.dtype)
    return torch.autograd.grad(o, leaves["g"], do)[0].double()


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    for op, impls in ROWS.items():
        for impl in impls:
            worst = 0.0
            for T in (128, 200):
                for seed in range(seeds):
                    given = inputs(op, T, seed)
                    want = gradient(op, {n: x.double() for n, x in given.items()}, "eager")
                    got = gradient(op, given, impl)
                    worst = max(worst, float((got - want).norm() / want.norm()))
            print(op, impl, f"{worst:.1e}", flush=True)


if __name__ == "__main__":
    main()
