"""The linear family on a GPU beside fla-core: rows of PERF.md's table; bench/linear.py runs it.

Ours and the peer at the same inputs in one process, bf16, medians with the L2 cache flushed between
runs. Ours is compared first with the float64 chunkwise path on a part of those inputs: the worst of
o and the final state, of gradients, of gradients of gates and beta, each with its name, and PAST
where that is past its limit. first: seconds of the first call, forward and backward. peak: of
memory, inputs and gradients too. differs: ours from the peer's o.

The peer tunes itself for minutes: its first call is one in a process of its own, which has a limit
and leaves what it found on disk (python bench/linear_peers.py ROW does no more than that); or it is
tuned among what linear_tuned.py found to be its best, where the first calls of all rows go side by
side, each in its process. The peer are fla's own Triton kernels. It is compared with the float64
path too, so that it is called right: "fla error", the worst of its o and states, of its gradients.
Where it has no gradient on this GPU, its forward alone is timed, and the row says why.
"""

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
P = (1, 4096, 32, 32)  # two steps a token
WIDTH, SLOTS, STEPS, PART = 128, 64, 2, 512
GATES = ("g", "gk", "w", "beta")
LIMITS = {"out error": 5e-3, "grad error": 8e-3, "gate error": 2e-2}


@dataclass(frozen=True)
class Row:
    """names: the arguments, as INPUTS makes them. peer: fla's module, "" where it has nothing.

    size: B, T, heads of q and k, heads of v. milestone: ms forward, and with backward, wanted.
    out: the dimensions of o.
    """

    op: str
    label: str
    size: tuple[int, int, int, int]
    names: str
    peer: str
    milestone: tuple[float, float] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    out: str = "BTVD"

    def shape(self, dims: str, tokens: int, heads: int | None = None) -> tuple[int, ...]:
        """Of B, T, S steps, H and V heads of q and of v, D their width, M slots, C channels."""
        B, _, H, HV = self.size
        H, HV = (H, HV) if heads is None else (heads, heads * HV // H)
        sizes = {"B": B, "T": tokens, "S": STEPS * tokens, "H": H, "V": HV}
        sizes |= {"D": WIDTH, "M": SLOTS, "C": H * WIDTH}
        return tuple(sizes[x] for x in dims)


def _unit(*shape: int) -> Tensor:
    return F.normalize(torch.randn(*shape, device="cuda"), dim=-1).bfloat16()


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _positive(*shape: int) -> Tensor:
    return torch.rand(*shape, device="cuda").bfloat16()


def _gate(*shape: int) -> Tensor:
    return -0.1 * torch.rand(*shape, device="cuda")


def _narrow_gate(*shape: int) -> Tensor:
    return _gate(*shape).bfloat16()


# By argument: how, and dimensions as Row.shape takes them.
INPUTS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "q": (_unit, "BTHD"),
    "r": (_unit, "BTHD"),
    "k": (_unit, "BTHD"),
    "v": (_normal, "BTVD"),
    "p": (_unit, "BTHD"),
    "a": (_unit, "BTHD"),
    "b": (lambda *shape: -0.5 * _unit(*shape), "BTHD"),
    "g": (_gate, "BTV"),
    "beta": (_positive, "BTV"),
    "gk": (_narrow_gate, "BTVD"),
    "w": (lambda *shape: (6 * _gate(*shape)).bfloat16(), "BTVD"),
    "u": (_normal, "VD"),
    "s": (lambda *shape: 0.1 * _positive(*shape), "BTHM"),
    "gs": (_narrow_gate, "BTHM"),
    "ks": (_unit, "BSHD"),
    "vs": (_normal, "BSVD"),
    "betas": (_positive, "BSV"),
    "x": (_normal, "BTC"),
    "gx": (_narrow_gate, "BTC"),
}
CHANNEL = {"gk": "g"}
PLAIN = {"normalize": False}
LAYER = {"layer_idx": 6, "num_layers": 12}
STEPPED = {"ks": "k", "vs": "v", "betas": "beta"}
ROWS = [
    Row("linear_attn", "A", A, "q k v", "linear_attn", (0.28, 1.2), PLAIN),
    Row("linear_attn", "C", C, "q k v", "linear_attn", (0.20, 0.8), PLAIN),
    Row("retention", "A", A, "q k v", "retention", (0.28, 1.2)),
    Row("retention", "C", C, "q k v", "retention"),
    Row("lightning_attn", "A", A, "q k v", "lightning_attn", options=LAYER),
    # fla refuses: its backward is miscompiled on sm_90
    Row("simple_gla", "A", A, "q k v g", "", (0.30, 1.3)),
    Row("gla", "A", A, "q k v gk", "gla", (0.8, 3.5), renamed=CHANNEL),
    Row("gla", "C", C, "q k v gk", "gla", renamed=CHANNEL),
    Row("rwkv6", "A", A, "r k v gk u", "rwkv6", renamed={"gk": "w"}),
    Row("gsa", "A", A, "q k v s gs", "gsa", renamed={"gs": "g"}),
    Row("hgrn", "A", A, "x gx", "hgrn", renamed={"gx": "g"}, out="BTC"),
    Row("delta_rule", "A", A, "q k v beta", "delta_rule", (0.8, 2.8)),
    Row("gated_delta_rule", "Q1", Q1, "q k v g beta", "gated_delta_rule", (0.55, 2.0)),
    Row("gated_delta_rule", "Q2", Q2, "q k v g beta", "gated_delta_rule", (0.45, 1.8)),
    Row("comba", "A", A, "q k v p g beta", "comba"),
    Row("kda", "A", A, "q k v gk beta", "kda", (1.6, 8.0), renamed=CHANNEL),
    Row(
        *("gated_delta_product", "P", P, "q ks vs g betas", "gated_delta_product"),
        options={"num_householder": STEPS},
        renamed=STEPPED,
    ),
    Row("iplr_delta_rule", "A", A, "q k v a b", "generalized_delta_rule"),
    Row("rwkv7", "A", A, "r w k v a b", "rwkv7", (2.5, 9.0)),
    Row("dplr_delta_rule", "A", A, "q k v a b gk", "generalized_delta_rule", (2.5, 9.0)),
]


def inputs(row: Row, part: bool, shorter: int = 1, heads: int | None = None) -> dict[str, Tensor]:
    """part: a short sequence, of so many heads of q."""
    tokens = PART if part else row.size[1] // shorter
    made = {}
    for name in row.names.split():
        make, dims = INPUTS[name]
        made[row.renamed.get(name, name)] = make(*row.shape(dims, tokens, heads))
    return made


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def ours_of(row: Row) -> Callable[..., Any]:
    return getattr(ops, f"chunk_{row.op}")


def results(
    fn: Callable[..., Any], row: Row, given: dict[str, Tensor], do: Tensor, **more: Any
) -> dict[str, Tensor]:
    """o, the final states, and gradients by their argument's name, if there is a backward."""
    leaves = {n: x.detach().requires_grad_() for n, x in given.items()}
    o, state = fn(**leaves, **row.options, output_final_state=True, **more)
    states = state if isinstance(state, (tuple, list)) else (state,)
    found = {"o": o.detach(), **{f"state{i or ''}": x.detach() for i, x in enumerate(states)}}
    try:
        grads = torch.autograd.grad(o, list(leaves.values()), do.to(o.dtype))
    except (NotImplementedError, RuntimeError):  # the peer's, and not ours: it has no backward
        if fn is ours_of(row):
            raise
        return found
    return found | dict(zip(leaves, grads))


def against_float64(
    row: Row, fn: Callable[..., Any] | None = None, heads: int | None = 2
) -> dict[str, float]:
    """Errors by tensor, of fn or of ours, at a part of the inputs."""
    made = inputs(row, True, heads=heads)
    do = _normal(*row.shape(row.out, PART, heads))
    got = results(fn or ours_of(row), row, made, do)
    wide = {n: x.double() for n, x in made.items()}
    want = results(ours_of(row), row, wide, do, impl="eager")
    return {n: error(x, want[n]) for n, x in got.items()}


def judged(errors: dict[str, float]) -> dict[str, str]:
    """The worst tensor of each kind, and whether it keeps within its limit."""

    def kind(name: str) -> str:
        outs = "out error" if name == "o" or name.startswith("state") else "grad error"
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
        self.do = _normal(*row.shape(row.out, row.size[1]))
        self.no_backward = "" if fn is not ours_of(row) else None  # or why; ours has one

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.fn(**self.given, **self.options)[0]

    def both(self) -> Any:
        o = self.fn(**self.given, **self.options)[0]
        return torch.autograd.grad(o, self.leaves, self.do[:, : o.shape[1]], allow_unused=True)

    def first(self) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        try:
            self.both()
        except (NotImplementedError, RuntimeError) as e:
            if self.no_backward is None:
                raise
            self.no_backward = f"no backward: {str(e)[:60]}"
            self.forward()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def measure(self) -> dict[str, float]:
        first = self.first()
        found = {"first_s": first, "fwd": bench(self.forward)}
        if self.no_backward:
            return found
        torch.cuda.reset_peak_memory_stats()
        self.both()
        peak = torch.cuda.max_memory_allocated() / 2**30
        return {**found, "both": bench(self.both), "peak_GiB": peak}


def floors(given: dict[str, Tensor], out: int) -> tuple[float, float]:
    """ms: inputs read and outputs, of so many bytes, written once, forward and with backward."""
    read = sum(x.numel() * x.element_size() for x in given.values())
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


def first_of_peer(row: Row, limit: float, tuned: Sequence[str] = ()) -> float | str:
    """Seconds, or what went wrong. tuned: of choose, a folder and how many."""
    run = [sys.executable, str(Path(__file__)), str(ROWS.index(row)), *tuned]
    try:
        done = subprocess.run(run, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"first call over {limit:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"rc {done.returncode}"])[-1][:60]
    return float(done.stdout.split()[-1])


def firsts_of_peers(
    wanted: Sequence[Row], limit: float, tuned: Sequence[str]
) -> dict[int, float | str]:
    """Of all at once, by place in ROWS: what they compile is in the caches afterwards."""
    able = [row for row in wanted if row.peer]
    with ThreadPoolExecutor(len(able) or 1) as pool:
        found = pool.map(lambda row: first_of_peer(row, limit, tuned), able)
        return {ROWS.index(row): x for row, x in zip(able, found)}


def _against(wanted: tuple[float, float] | None, mine: dict[str, float]) -> str:
    if wanted is None:
        return ""
    met = mine["fwd"] <= wanted[0] and mine["both"] <= wanted[1]
    return f"{wanted[0]} {wanted[1]} {'met' if met else 'NOT MET'}"


def one(row: Row, limit: float, first: float | str | None) -> dict[str, object]:
    """first: what the peer's first call took, if it was made before."""
    torch.manual_seed(0)
    found: dict[str, object] = {"operator": row.op, "shape": row.label}
    found |= judged(against_float64(row))
    given = inputs(row, False)
    ours = Provider(ours_of(row), given, row)
    mine = ours.measure()
    f, both = floors(given, ours.do.numel() * ours.do.element_size())
    found |= {name: round(x, 3) for name, x in mine.items()}
    found |= {"x floor": f"{mine['fwd'] / f:.1f} {mine['both'] / both:.1f}"}
    found |= {"milestone": _against(row.milestone, mine)}
    fla = peer_of(row) if limit else "not asked"
    if isinstance(fla, str):
        return found | {"fla": fla}
    first = first_of_peer(row, limit) if first is None else first
    if isinstance(first, str):
        return found | {"fla": first}
    try:
        return found | {"fla first_s": first} | _beside(Provider(fla, given, row), ours, mine, row)
    except Exception as e:
        return found | {"fla": f"{type(e).__name__}: {str(e)[:40]}"}


def _beside(
    theirs: Provider, ours: Provider, mine: dict[str, float], row: Row
) -> dict[str, object]:
    measured = theirs.measure()
    measured.pop("first_s")
    found: dict[str, object] = {f"fla {name}": round(x, 3) for name, x in measured.items()}
    found |= {"differs": f"{error(theirs.forward(), ours.forward()):.1e}"}
    times = [f"{measured[x] / mine[x]:.2f}" for x in ("fwd", "both") if x in measured]
    found |= {"fla": " ".join([*times, "x", theirs.no_backward or ""]).strip()}
    errors = judged(against_float64(row, theirs.fn, heads=None))
    return found | {"fla error": ", ".join(errors.values())}


def warm(row: Row, limit: float) -> dict[str, object]:
    """Errors, and one call of each side: from then on the caches have all that row launches."""
    torch.manual_seed(0)
    found: dict[str, object] = {"operator": row.op, "shape": row.label}
    found |= judged(against_float64(row))
    given = inputs(row, False)
    peer = peer_of(row) if limit else "not asked"
    for name, fn in (("ours", ours_of(row)), ("fla", peer)):
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
    wanted = [x for x in ROWS if any(name in x.op for name in only)][part::parts]
    firsts: dict[int, float | str] = {}
    if tuned:
        from linear_tuned import choose

        if limit and not warming:
            firsts = firsts_of_peers(wanted, limit, (tuned, str(best)))
        choose(Path(tuned), best)
    for row in wanted:
        try:
            yield warm(row, limit) if warming else one(row, limit, firsts.get(ROWS.index(row)))
        except Exception as e:
            failed = f"{type(e).__name__}: {str(e)[:60]}"
            yield {"operator": row.op, "shape": row.label, "error": failed}
        torch.cuda.empty_cache()


def main(place: str, tuned: str = "", best: str = "3") -> None:
    """The first call of the peer's of a row."""
    if tuned:
        from linear_tuned import choose

        choose(Path(tuned), int(best))
    row = ROWS[int(place)]
    peer = peer_of(row)
    assert not isinstance(peer, str), peer
    print(Provider(peer, inputs(row, False), row).first())


if __name__ == "__main__":
    main(*sys.argv[1:])
