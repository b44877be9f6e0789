"""The linear family on a GPU beside fla-core: rows of PERF.md's table; bench/linear.py runs it.

Ours and the peer at the same inputs in one process, bf16, medians with the L2 cache flushed between
runs. Ours is compared first with the float64 chunkwise path on a part of those inputs: the worst of
o and the final state, of gradients, of gradients of gates and beta, each with its name, and PAST
where that is past its limit. first: seconds of the first call, forward and backward. peak: of
memory, inputs and gradients too. differs: ours from the peer's o.

The peer tunes itself for minutes: its first call is one in a process of its own, which has a limit
and leaves what it found on disk (python bench/linear_peers.py ROW does no more than that); or it is
tuned among what linear_tuned.py found to be its best. The peer are fla's own Triton kernels.
"""

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream import ops

os.environ.setdefault("FLA_FLASH_QLA", "0")  # which fla calls where it is installed
COPY_BYTES_PER_MS = 4.28e9  # device copy on an H200
A, C = (1, 8192, 96, 96), (1, 32768, 8, 8)
Q1, Q2 = (1, 8192, 16, 64), (1, 32768, 2, 8)
WIDTH, PART = 128, 512
GATES = ("g", "gk", "w", "beta")
LIMITS = {"out error": 5e-3, "grad error": 8e-3, "gate error": 2e-2}


@dataclass(frozen=True)
class Row:
    """names: the arguments, as INPUTS makes them. peer: fla's module, "" where it has nothing.

    size: B, T, heads of q and k, heads of v. milestone: ms forward, and with backward, wanted.
    """

    op: str
    label: str
    size: tuple[int, int, int, int]
    names: str
    peer: str
    milestone: tuple[float, float] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)


def _unit(*shape: int) -> Tensor:
    return F.normalize(torch.randn(*shape, device="cuda"), dim=-1).bfloat16()


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _gate(*shape: int) -> Tensor:
    return -0.1 * torch.rand(*shape, device="cuda")


# By argument: how, heads of H | V, width or none.
INPUTS: dict[str, tuple[Callable[..., Tensor], str, bool]] = {
    "q": (_unit, "H", True),
    "r": (_unit, "H", True),
    "k": (_unit, "H", True),
    "v": (_normal, "V", True),
    "p": (_unit, "H", True),
    "a": (_unit, "H", True),
    "b": (lambda *shape: -0.5 * _unit(*shape), "H", True),
    "g": (_gate, "V", False),
    "beta": (lambda *shape: torch.rand(*shape, device="cuda").bfloat16(), "V", False),
    "gk": (lambda *shape: _gate(*shape).bfloat16(), "V", True),
    "w": (lambda *shape: (6 * _gate(*shape)).bfloat16(), "V", True),
}
CHANNEL = {"gk": "g"}
PLAIN = {"normalize": False}
ROWS = [
    Row("linear_attn", "A", A, "q k v", "linear_attn", (0.28, 1.2), PLAIN),
    Row("linear_attn", "C", C, "q k v", "linear_attn", (0.20, 0.8), PLAIN),
    Row("retention", "A", A, "q k v", "retention", (0.28, 1.2)),
    Row("retention", "C", C, "q k v", "retention"),
    # fla refuses: its backward is miscompiled on sm_90
    Row("simple_gla", "A", A, "q k v g", "", (0.30, 1.3)),
    Row("gla", "A", A, "q k v gk", "gla", (0.8, 3.5), renamed=CHANNEL),
    Row("gla", "C", C, "q k v gk", "gla", renamed=CHANNEL),
    Row("delta_rule", "A", A, "q k v beta", "delta_rule", (0.8, 2.8)),
    Row("gated_delta_rule", "Q1", Q1, "q k v g beta", "gated_delta_rule", (0.55, 2.0)),
    Row("gated_delta_rule", "Q2", Q2, "q k v g beta", "gated_delta_rule", (0.45, 1.8)),
    Row("comba", "A", A, "q k v p g beta", "comba"),
    Row("kda", "A", A, "q k v gk beta", "kda", (1.6, 8.0), renamed=CHANNEL),
    Row("rwkv7", "A", A, "r w k v a b", "rwkv7", (2.5, 9.0)),
    Row("dplr_delta_rule", "A", A, "q k v a b gk", "generalized_delta_rule", (2.5, 9.0)),
]


def inputs(row: Row, part: bool, shorter: int = 1) -> dict[str, Tensor]:
    B, T, H, HV = row.size
    T //= shorter
    if part:
        B, T, H, HV = 1, PART, 2, 2 * HV // H
    made = {}
    for name in row.names.split():
        make, heads, wide = INPUTS[name]
        shape = (B, T, H if heads == "H" else HV, *((WIDTH,) if wide else ()))
        made[row.renamed.get(name, name)] = make(*shape)
    return made


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def against_float64(row: Row) -> dict[str, float]:
    """Errors by tensor: o and the final state, gradients by their argument's name."""
    fn, results = getattr(ops, f"chunk_{row.op}"), []
    made = inputs(row, True)
    do = _normal(1, PART, made["v"].shape[2], WIDTH)
    for impl, wide in ((None, False), ("eager", True)):
        given = {n: (x.double() if wide else x).requires_grad_() for n, x in made.items()}
        o, state = fn(**given, **row.options, output_final_state=True, impl=impl)
        grads = torch.autograd.grad(o, list(given.values()), do.to(o.dtype))
        results.append([o.detach(), state.detach(), *grads])
        made = {n: x.detach() for n, x in made.items()}
    return {n: error(x, y) for n, x, y in zip(("o", "state", *made), *results)}


def judged(errors: dict[str, float]) -> dict[str, str]:
    """The worst tensor of each kind, and whether it keeps within its limit."""

    def kind(name: str) -> str:
        outs = "out error" if name in ("o", "state") else "grad error"
        return "gate error" if name in GATES else outs

    found = {}
    for label, limit in LIMITS.items():
        mine = {n: e for n, e in errors.items() if kind(n) == label}
        if mine:
            name = max(mine, key=lambda n: mine[n])
            found[label] = f"{name} {mine[name]:.1e}" + ("" if mine[name] <= limit else " PAST")
    return found


def bench(fn: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    timed: Any = do_bench
    return timed(fn, warmup=20, rep=80, return_mode="median")


class Provider:
    """One side's operator at the inputs: output, times, first call, memory."""

    def __init__(self, fn: Callable[..., Any], given: dict[str, Tensor], row: Row) -> None:
        self.fn, self.given, self.options = fn, given, row.options
        self.leaves = [x.requires_grad_() for x in given.values()]
        self.do = torch.randn_like(given["v"])

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.fn(**self.given, **self.options)[0]

    def both(self) -> Any:
        return torch.autograd.grad(
            self.fn(**self.given, **self.options)[0], self.leaves, self.do, allow_unused=True
        )

    def first(self) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.both()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def measure(self) -> dict[str, float]:
        first = self.first()
        torch.cuda.reset_peak_memory_stats()
        self.both()
        peak = torch.cuda.max_memory_allocated() / 2**30
        return {
            "fwd": bench(self.forward),
            "both": bench(self.both),
            "first_s": first,
            "peak_GiB": peak,
        }


def floors(given: dict[str, Tensor]) -> tuple[float, float]:
    """ms: inputs read and outputs written once, forward and forward with backward."""
    read = sum(x.numel() * x.element_size() for x in given.values())
    out = given["v"].numel() * given["v"].element_size()
    forward = read + out
    return forward / COPY_BYTES_PER_MS, (forward + 2 * read + out) / COPY_BYTES_PER_MS


def peer_of(row: Row) -> Callable[..., Any] | str:
    """fla's operator, or why there is none."""
    if not row.peer:
        return "refuses"
    try:
        return getattr(importlib.import_module(f"fla.ops.{row.peer}"), f"chunk_{row.op}")
    except (ImportError, AttributeError) as e:
        return f"missing: {e}"[:40]


def first_of_peer(row: Row, limit: float) -> float | str:
    """Seconds, or what went wrong."""
    run = [sys.executable, str(Path(__file__)), str(ROWS.index(row))]
    try:
        done = subprocess.run(run, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"first call over {limit:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"rc {done.returncode}"])[-1][:60]
    return float(done.stdout.split()[-1])


def _against(wanted: tuple[float, float] | None, mine: dict[str, float]) -> str:
    if wanted is None:
        return ""
    met = mine["fwd"] <= wanted[0] and mine["both"] <= wanted[1]
    return f"{wanted[0]} {wanted[1]} {'met' if met else 'NOT MET'}"


def one(row: Row, limit: float, tuned: bool) -> dict[str, object]:
    torch.manual_seed(0)
    found: dict[str, object] = {"operator": row.op, "shape": row.label}
    found |= judged(against_float64(row))
    given = inputs(row, False)
    ours = Provider(getattr(ops, f"chunk_{row.op}"), given, row)
    mine, (f, both) = ours.measure(), floors(given)
    found |= {name: round(x, 3) for name, x in mine.items()}
    found |= {"x floor": f"{mine['fwd'] / f:.1f} {mine['both'] / both:.1f}"}
    found |= {"milestone": _against(row.milestone, mine)}
    fla = peer_of(row) if limit or tuned else "not asked"
    if isinstance(fla, str):
        return found | {"fla": fla}
    first = "tuned before" if tuned else first_of_peer(row, limit)
    if isinstance(first, str) and not tuned:
        return found | {"fla": first}
    try:
        theirs = Provider(fla, given, row)
        measured = theirs.measure()
        found |= {f"fla {name}": round(x, 3) for name, x in measured.items()}
        found |= {"fla first_s": first, "differs": f"{error(theirs.forward(), ours.forward()):.1e}"}
        times = (measured[x] / mine[x] for x in ("fwd", "both"))
        return found | {"fla": " ".join(f"{x:.2f}" for x in times) + " x"}
    except Exception as e:
        return found | {"fla": f"{type(e).__name__}: {str(e)[:40]}"}


def warm(row: Row) -> dict[str, object]:
    """Errors, and one call of each side: from then on the caches have all that row launches."""
    torch.manual_seed(0)
    found: dict[str, object] = {"operator": row.op, "shape": row.label}
    found |= judged(against_float64(row))
    given = inputs(row, False)
    for name, fn in (("ours", getattr(ops, f"chunk_{row.op}")), ("fla", peer_of(row))):
        if not isinstance(fn, str):
            found[name] = f"{Provider(fn, given, row).first():.1f} s"
    return found


def rows(
    limit: float,
    only: Sequence[str],
    part: int,
    parts: int,
    tuned: str = "",
    best: int = 3,
    warming: bool = False,
) -> Iterator[dict[str, object]]:
    """Of operators with one of `only` in their names.

    Args:
        limit: of seconds for the peer's first call, 0 for no peer.
        tuned: a folder of surveys. best: of a kernel's configurations there, so many are tried.
        warming: no times are taken.
    """
    if tuned:
        from linear_tuned import choose

        choose(Path(tuned), best)
    wanted = [x for x in ROWS if any(name in x.op for name in only)]
    for row in wanted[part::parts]:
        try:
            yield warm(row) if warming else one(row, limit, bool(tuned))
        except Exception as e:
            failed = f"{type(e).__name__}: {str(e)[:60]}"
            yield {"operator": row.op, "shape": row.label, "error": failed}
        torch.cuda.empty_cache()


if __name__ == "__main__":
    ROW = ROWS[int(sys.argv[1])]
    PEER = peer_of(ROW)
    assert not isinstance(PEER, str), PEER
    print(Provider(PEER, inputs(ROW, False), ROW).first())
