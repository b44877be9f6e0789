"""The CPU's speed beside that of an earlier state of the sources, in one run.

    git archive COMMIT | tar x -C /tmp/before && python bench/cpu_before.py /tmp/before NAME

Two processes, one a state, do the same work in turns, one call each, on one thread. On a shared
machine the clock says how busy it was: what counts is the processor's time, and of the turns the
medians' ratio, earlier over now, so that above 1 is faster now. Where memory happens to lie makes
a tenth or two of a process's speed, so both are started a few times. The demo's model trains a
batch; the operators have B 1, T 2048, 8 heads, K = V = 128, float32.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from record import record, table

HERE = Path(__file__).parents[1]
T, H, D = 2048, 8, 128


def operators() -> dict[str, Callable[[], Any]]:
    import torch.nn.functional as F

    from slipstream import ops

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, T, H, D) for _ in range(3))
    g, beta = F.logsigmoid(torch.randn(1, T, H) + 3), torch.rand(1, T, H)
    wide = F.logsigmoid(torch.randn(1, T, H, D) + 3)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
    x, weight, taps = torch.randn(1, T, 1024), torch.rand(1024), torch.randn(1024, 4)
    hidden, table, target = torch.randn(512, 128), torch.randn(8192, 128), torch.arange(512)
    inputs = [y.clone().requires_grad_() for y in (hidden, table)]
    normed: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}

    def both() -> Any:
        o = ops.chunk_gated_delta_rule(*leaves, **normed)[0]
        return torch.autograd.grad(o.sum(), leaves)

    return {
        "gated delta rule": lambda: ops.chunk_gated_delta_rule(q, k, v, g, beta, **normed),
        "gated delta rule, with gradients": both,
        "kda": lambda: ops.chunk_kda(q, k, v, wide, beta, **normed),
        "gated delta rule, a step": lambda: ops.fused_recurrent_gated_delta_rule(
            *(y[:, :1] for y in (q, k, v)), g=g[:, :1], beta=beta[:, :1], **normed
        ),
        "rms_norm": lambda: ops.rms_norm(x, weight),
        "short_convolution": lambda: ops.short_convolution(x, taps, activation="silu"),
        "linear_cross_entropy, with gradients": lambda: torch.autograd.grad(
            ops.linear_cross_entropy(inputs[0], inputs[1], target), inputs
        ),
    }


def model() -> Callable[[], Any]:
    """A step of the demo's model: loss and gradients of four rows of 256 tokens."""
    from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 128, "num_heads": 2, "intermediate_size": 352}
    sizes["mixers"] = ["gated_deltanet", "gated_deltanet", "gated_deltanet", "attention"]
    torch.manual_seed(0)
    lm = SlipstreamForCausalLM(SlipstreamConfig(vocab_size=8192, **sizes))
    ids = torch.randint(0, 8192, (4, 256))

    def step() -> None:
        lm.zero_grad()
        lm(input_ids=ids, labels=ids).loss.backward()

    return step


def child() -> None:
    """Says what work it has, then for each number on stdin does that work once and says how long
    the processor was at it."""
    torch.set_num_threads(1)
    works = {"training step of the demo's model": model(), **operators()}
    print(",".join(name.replace(",", ";") for name in works), flush=True)
    calls = list(works.values())
    for line in sys.stdin:
        call, spent = calls[int(line)], time.process_time()
        call()
        print(time.process_time() - spent, flush=True)


class State:
    """A process on the sources in a directory."""

    def __init__(self, sources: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child"],
            env={**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.works = self._process.stdout.readline().strip().split(",")

    def run(self, work: int) -> float:
        """Seconds."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        print(work, file=stdin, flush=True)
        return float(stdout.readline())

    def end(self) -> None:
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("name", nargs="?", help="of the earlier state, for the rows")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--starts", type=int, default=3, help="of both processes")
    parser.add_argument("--only", default="", help="work with this in its name")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--dry", action="store_true", help="without recording")
    options = parser.parse_args()
    if options.child:
        child()
        return
    found: dict[str, list[list[tuple[float, ...]]]] = {}
    for _ in range(options.starts):
        states = [State(options.before), State(HERE)]
        for work, name in enumerate(states[0].works):
            if options.only not in name:
                continue
            for state in states:
                state.run(work)
            turns = [tuple(state.run(work) for state in states) for _ in range(options.turns)]
            found.setdefault(name, []).append(turns)
        for state in states:
            state.end()
    rows = []
    for name, starts in found.items():
        before, now = (1e3 * statistics.median(x) for x in zip(*chain(*starts)))
        each = (statistics.median(x / y for x, y in turns) for turns in starts)
        rows.append({
            "work": name, "before": options.name, "before_ms": f"{before:.2f}",
            "now_ms": f"{now:.2f}", "ratio": f"{before / now:.3f}", "turns": options.turns,
            "each_start": " ".join(f"{x:.3f}" for x in each),
        })  # fmt: skip
    print(table(rows), flush=True)
    if not options.dry:
        record("cpu_before", rows)


if __name__ == "__main__":
    main()
