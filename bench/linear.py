"""The linear family beside its peers, in one run: fla-core on a GPU, else transformers on a CPU.

    python bench/linear.py             times, prints, and appends to bench/results/linear_*.csv
    python bench/linear.py --dry       without recording
    python bench/linear.py --cpu       the CPU's rows where there is a GPU
    python bench/linear.py --limit 60  on a GPU: the peer, where it tunes no longer; 0: without it
    python bench/linear.py --tuned DIR the peer tuned among what linear_tuned.py put there; the
                                       first calls of all rows go side by side, each to its limit
    python bench/linear.py --best 1    and among no more than its best one of each kernel
    python bench/linear.py --warm      on a GPU: errors, and one call of each side (with --limit 0
                                       of ours alone): fills the caches
    python bench/linear.py --only gla,kda  operators with these in their names; --part 1/3 a third

On a GPU: linear_peers.py. The rest is about a CPU. Ours and the peer take turns on the same inputs,
and the medians are compared: on a shared machine only their ratio means something. float32, B 1,
T 2048, 8 heads, K = V = 128, queries and keys normalised inside as the models do.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

# threads that spin while they wait stall each other where cores are shared
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from record import record, table
from rich.console import Console
from rich.table import Table

from slipstream import ops

B, T, H, D = 1, 2048, 8, 128
NORMALISED = {"use_qk_l2norm_in_kernel": True}


def inputs(tokens: int, channel_gate: bool, requires_grad: bool) -> dict[str, torch.Tensor]:
    shape = (B, tokens, H, D)
    gate = shape if channel_gate else shape[:3]
    made = {
        "q": torch.randn(shape),
        "k": torch.randn(shape),
        "v": torch.randn(shape),
        "g": F.logsigmoid(torch.randn(gate) + 3),
        "beta": torch.rand(shape[:3]),
    }
    return {name: x.requires_grad_(requires_grad) for name, x in made.items()}


def alternate(
    ours: Callable[[], object], peer: Callable[[], object], repeats: int
) -> tuple[float, float]:
    """Median milliseconds of both, one call of each in turn."""
    calls = (ours, peer)
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, mine in zip(calls, times):
            start = time.perf_counter()
            call()
            mine.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[0]), statistics.median(times[1])


def gated_delta_rule(x: dict[str, torch.Tensor], decode: bool, state: torch.Tensor | None):
    from transformers.models.qwen3_next import modeling_qwen3_next as peer

    theirs = peer.torch_recurrent_gated_delta_rule if decode else peer.torch_chunk_gated_delta_rule
    fused, chunk = ops.fused_recurrent_gated_delta_rule, ops.chunk_gated_delta_rule
    options = {"initial_state": state, "output_final_state": decode, **NORMALISED}
    return (
        lambda: (fused if decode else chunk)(**x, **options),
        lambda: theirs(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], **options),
    )


def kda(x: dict[str, torch.Tensor], decode: bool, state: torch.Tensor | None):
    from transformers.models.kimi_linear import modeling_kimi_linear as peer

    theirs = peer.recurrent_kimi_delta_attention if decode else peer.chunk_kimi_delta_attention
    options = {"initial_state": state, "output_final_state": decode, **NORMALISED}
    return (
        lambda: (ops.fused_recurrent_kda if decode else ops.chunk_kda)(**x, **options),
        lambda: theirs(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], **options),
    )


WORK = [  # name, operator, forward / backward / decode, ratio to the peer that we promise
    ("gated delta rule forward", gated_delta_rule, "forward", 0.35),
    ("gated delta rule forward + backward", gated_delta_rule, "backward", 0.55),
    ("gated delta rule decoding step", gated_delta_rule, "decode", 1.0),
    ("kda forward", kda, "forward", 0.12),
    ("kda forward + backward", kda, "backward", None),
    ("kda decoding step", kda, "decode", 1.0),
]


def measure(operator: Callable, mode: str, repeats: int) -> tuple[float, float, float]:
    """Milliseconds of ours and of the peer, and the largest difference between their outputs."""
    x = inputs(1 if mode == "decode" else T, operator is kda, mode == "backward")
    state = torch.randn(B, H, D, D) if mode == "decode" else None
    ours, peer = operator(x, mode == "decode", state)
    difference = (ours()[0] - peer()[0]).abs().max().item()
    if mode == "backward":
        grad = torch.randn(B, T, H, D)
        leaves = list(x.values())

        def grads(f: Callable) -> Callable[[], object]:
            return lambda: torch.autograd.grad(f()[0], leaves, grad)

        return (*alternate(grads(ours), grads(peer), repeats), difference)
    with torch.no_grad():
        repeats *= 100 if mode == "decode" else 1
        return (*alternate(ours, peer, repeats), difference)


def show(rows: list[dict[str, object]]) -> None:
    """One table; a row may lack columns."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    made = Table(*names)
    for row in rows:
        made.add_row(*(str(row.get(name, "")) for name in names))
    Console(width=200).print(made)


def on_gpu(args: argparse.Namespace) -> None:
    import linear_peers

    part, parts = map(int, args.part.split("/"))
    rows = []
    only, tuned = args.only.split(","), (args.tuned, args.best)
    for row in linear_peers.rows(args.limit, only, part, parts, *tuned, args.warm):
        rows.append(row)
        print(*(f"{name} {x}," for name, x in row.items()), flush=True)
        if not (args.dry or args.warm):
            record("linear_gpu_peers", [row])
    show(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("dry", "cpu", "warm"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("only", "tuned"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--best", type=int, default=3)
    parser.add_argument("--limit", type=float, default=400.0)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    if torch.cuda.is_available() and not args.cpu:
        on_gpu(args)
    else:
        on_cpu(args)


def on_cpu(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    rows = []
    for name, operator, mode, promise in WORK:
        if args.only not in name:
            continue
        ours, peer, difference = measure(operator, mode, args.repeats)
        assert difference < 1e-4, f"{name}: differs from transformers by {difference}"
        rows.append(
            {
                "work": name,
                "shape": f"B{B} T{1 if mode == 'decode' else T} H{H} K{D} V{D} float32",
                "ours_ms": f"{ours:.3f}",
                "transformers_ms": f"{peer:.3f}",
                "ratio": f"{ours / peer:.3f}",
                "promised": promise if promise is not None else "",
            }
        )
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    show(rows)
    if not args.dry:
        print("recorded in", record("linear_cpu", rows))


if __name__ == "__main__":
    main()
