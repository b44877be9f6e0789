"""The linear attention family beside its peers.

    python bench/linear.py                    every operator, beside fla-core if it is installed
    python bench/linear.py --peer none        ours alone
    python bench/linear.py --peer flash_qla   the gated delta rule beside FlashQLA
    python bench/linear.py --errors           ours and the peer's against float64, no times
    python bench/linear.py --peer cpu         on a CPU, beside transformers' reference code
    python bench/linear.py --lengths          time and memory against the length, 1024 to 65536
    python bench/linear.py --memory           peaks beyond inputs and results; --packed: 4 sequences
    python bench/linear.py --warm             every first call in a process of its own, side by side

bf16, K = V = 128 (64 in --lengths of rwkv7). fwd, both: milliseconds of a forward without
gradients, and of a forward with backward. first_s: seconds of the first call of both, with whatever
is compiled and tuned in it. peak_GiB: of both, beyond the inputs. Errors are relative root
mean squares against the float64 reference at 512 tokens: of outputs and states, of gradients, of
gradients of gates and beta, the largest of each kind.

--memory: T 8192, 32 heads, or FlashQLA's shapes. Percent are of inputs and results, and for both of
the gradients too. What fla takes does not depend on its tiles, so that one of each kernel is taken
untried.

fla's autotuner takes minutes an operator in the first call and FlashQLA's compiler as long; both
leave what they found in their caches (TRITON_CACHE_DIR with FLA_CACHE_RESULTS=1, and
TILELANG_CACHE_DIR). --warm fills them: a row counts as tuned only if the tuner tried everything.
"""

import importlib
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from harness import (
    DEVICE,
    Measurement,
    Provider,
    Report,
    error,
    first,
    in_turns,
    kernels_ms,
    parser,
    peak_bytes,
    rounded,
    sdpa,
)
from processes import take_first_tiles
from torch import Tensor
from torch.nn.attention import SDPBackend

from slipstream.tools.catalog import OPERATORS, Sample, Shape, chosen, family

os.environ.setdefault("FLA_FLASH_QLA", "0")  # fla would call FlashQLA where that is installed
# gradients of sums over all later tokens
GATES = ("g", "gk", "w", "beta", "angles")
LIMITS = {"out error": 5e-3, "grad error": 8e-3, "gate error": 2e-2}
A, C = Shape(B=1, T=8192, H=96), Shape(B=1, T=32768, H=8)
Q1, Q2 = Shape(B=1, T=8192, H=16, HV=64), Shape(B=1, T=32768, H=2, HV=8)
CHECKED = 512  # tokens
# fla has these in a module of another name; "" where it refuses to run on sm_90
FLA_MODULES = {
    "dplr_delta_rule": "generalized_delta_rule",
    "simple_gla": "",
}


@dataclass(frozen=True)
class Case:
    """A row of the catalogue at a shape; label as docs/performance.md has it."""

    name: str
    label: str
    shape: Shape

    @property
    def sample(self) -> Sample:
        return next(x for x in OPERATORS if x.name == self.name)

    @property
    def operator(self) -> str:
        return family(self.sample.op)

    @property
    def title(self) -> str:
        return f"{self.operator} {self.label}"


CASES = [
    Case("chunk_linear_attn", "A", A),
    Case("chunk_linear_attn", "C", C),
    Case("chunk_retention", "A", A),
    Case("chunk_retention", "C", C),
    Case("chunk_lightning_attn", "A", A),
    Case("chunk_simple_gla", "A", A),
    Case("chunk_gla-narrow", "A", A),
    Case("chunk_gla-narrow", "C", C),
    Case("chunk_rwkv6-narrow", "A", A),
    Case("chunk_gsa", "A", A),
    Case("chunk_hgrn", "A", A),
    Case("chunk_delta_rule", "A", A),
    Case("chunk_gated_delta_rule", "Q1", Q1),
    Case("chunk_gated_delta_rule", "Q2", Q2),
    Case("chunk_comba", "A", A),
    Case("chunk_kda-narrow", "A", A),
    Case("chunk_gated_delta_product", "P", Shape(B=1, T=4096, H=32)),
    Case("chunk_gdn2", "A", A),
    Case("chunk_mamba3", "A", A),
    Case("chunk_rwkv4", "A", A),
    Case("chunk_rwkv7-narrow", "A", A),
    Case("chunk_dplr_delta_rule", "A", A),
]
_LENGTHS = {"2048": (2048,), "4096": (4096,), "4x8192": (8192,) * 4, "8x1024": (1024,) * 8}
_HEADS = ((16, 64), (16, 32), (8, 24), (2, 8))
FLASH_QLA_SHAPES = {"Q1": Q1, "Q2": Q2} | {
    f"{name} {h}/{hv}": Shape(B=1, T=sum(x), H=h, HV=hv, lengths=x if len(x) > 1 else None)
    for name, x in _LENGTHS.items()
    for h, hv in _HEADS
}
# of --memory
PLAIN, PACKED = Shape(B=1, T=8192, H=32), Shape(B=4, T=8192, H=32, packed=True)
AGAINST_LENGTH = (
    "chunk_retention",
    "chunk_simple_gla",
    "chunk_gla",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "chunk_rwkv7-narrow",
    "attention",
)
TOKENS = (1024, 4096, 16384, 65536)


def ours(sample: Sample) -> Callable[..., Any]:
    return partial(sample.fn, **sample.options)


def fla(sample: Sample) -> Callable[..., Any]:
    """fla's operator, which takes the same arguments. Raises ImportError where it has none."""
    name = FLA_MODULES.get(family(sample.op), family(sample.op))
    if not name:
        raise ImportError("fla refuses to run it on this GPU")
    return partial(getattr(importlib.import_module(f"fla.ops.{name}"), sample.op), **sample.options)


def flash_qla() -> Callable[..., Any]:
    return importlib.import_module("flash_qla").chunk_gated_delta_rule


def errors(
    case: Case, fn: Callable[..., Any], report: Report, heads: int | None = 2
) -> dict[str, float]:
    """By tensor, of a provider at CHECKED tokens; without gradients where it has no backward.
    heads: of q; None for all, as fla has tuned itself for them."""
    shape = report.shape(replace(case.shape, T=CHECKED, lengths=None))
    if heads is not None:
        grouped = shape.HV and heads * shape.HV // shape.H
        shape = replace(shape, H=heads, HV=grouped)
    args = case.sample.inputs(shape, DEVICE)
    wide = {n: x.double() if x.is_floating_point() else x for n, x in args.items()}
    given, want = Provider(fn, args), Provider(partial(ours(case.sample), impl="eager"), wide)
    found = results(given)
    want.dout = given.dout.double() if given.dout is not None else None
    wanted = results(want)
    return {n: error(x, wanted[n]) for n, x in found.items()}


def results(given: Provider) -> dict[str, Tensor]:
    """o, final states and gradients by name."""
    o, *states = given.outputs(output_final_state=True)
    found = {"o": o} | {f"state{i or ''}": x for i, x in enumerate(states)}
    try:
        grads = zip(given.live, given.back(o))
    except (NotImplementedError, RuntimeError) as e:
        print(f"no backward: {str(e)[:80]}")
        return found
    return found | {n: x for n, x in grads if x is not None}


def is_output(name: str) -> bool:
    """Whether a tensor of `results` is no gradient."""
    return name == "o" or name.startswith("state")


def largest(found: Mapping[str, float]) -> dict[str, str]:
    """The largest error of each kind and the name of its tensor; PAST where it is too large."""

    def kind(name: str) -> str:
        outs = "out error" if is_output(name) else "grad error"
        return "gate error" if name in GATES else outs

    worst = {}
    for label, limit in LIMITS.items():
        mine = {n: e for n, e in found.items() if kind(n) == label}
        if mine:
            name = max(mine, key=lambda n: mine[n])
            worst[label] = f"{name} {mine[name]:.1e}" + ("" if mine[name] <= limit else " PAST")
    return worst


def beside_fla(case: Case, report: Report) -> dict[str, object]:
    shape = report.shape(case.shape)
    given = case.sample.inputs(shape, DEVICE)
    row: dict[str, object] = {"operator": case.operator, "shape": case.label}
    row |= largest(errors(case, ours(case.sample), report))
    providers = {"": Provider(ours(case.sample), given)}
    if report.options.peer == "fla":
        try:
            providers["fla "] = Provider(fla(case.sample), given)
            row["fla tuned"] = "full"  # by itself, now or when the cache was filled
        except ImportError as e:
            row["fla"] = str(e)[:60]
    forward, both = {}, {}
    for who, provider in providers.items():
        forward[who] = provider.forward
        row[f"{who}first_s"] = round(first(provider.forward), 2)
        try:
            row[f"{who}first_s"] = round(first(provider.gradients), 2)
            row[f"{who}peak_GiB"] = round(peak_bytes(provider.gradients) / 2**30, 3)
            both[who] = provider.gradients
        except (NotImplementedError, RuntimeError) as e:
            if not who:
                raise
            row["fla"] = f"no backward: {str(e)[:60]}"
    if report.options.once:
        return row
    for column, calls in (("fwd", forward), ("both", both)):
        times = in_turns(calls, report.runs(20))
        row |= {f"{who}{column}": round(ms, 4) for who, ms in times.items()}
    out = providers[""].forward()
    floors = providers[""].floors_ms(out)
    row["x floor"] = " ".join(
        f"{float(str(row[x])) / floor:.1f}" for x, floor in zip(("fwd", "both"), floors)
    )
    if "fla " in providers:
        row["differs"] = f"{error(providers['fla '].forward(), out):.1e}"
        row["fla error"] = ", ".join(
            largest(errors(case, fla(case.sample), report, heads=None)).values()
        )
    return row


def beside_flash_qla(name: str, shape: Shape, report: Report) -> dict[str, object]:
    """The same tensors; ours is first in the row, FlashQLA's results are compared with ours."""
    sample = chosen(["chunk_gated_delta_rule"])[0]
    args = sample.inputs(report.shape(shape), DEVICE)
    row: dict[str, object] = {"shape": name}
    providers = {
        "slipstream": Provider(ours(sample), args),
        "flash_qla": Provider(flash_qla(), args),
    }
    made: dict[str, list[Tensor]] = {}
    dout = torch.randn_like(providers["slipstream"].forward())
    for who, provider in providers.items():
        provider.dout = dout
        row[f"{who}_first_s"] = round(first(provider.gradients), 2)
        made[who] = [provider.forward(), *(x for x in provider.gradients() if x is not None)]
        row[f"{who}_peak_mib"] = peak_bytes(provider.gradients) >> 20
    apart = zip(made["flash_qla"], made["slipstream"], strict=True)
    row["flash_qla_off"] = " ".join(f"{error(x, y):.0e}" for x, y in apart)
    made.clear()
    if report.options.once:
        return row
    for column, way in (("ms", "forward"), ("both_ms", "gradients")):
        calls = {who: getattr(x, way) for who, x in providers.items()}
        found = in_turns(calls, report.runs(20))
        row |= {f"{who}_{column}": round(ms, 4) for who, ms in found.items()}
        row[f"{column}_of_peer"] = round(found["slipstream"] / found["flash_qla"], 3)
    for who, provider in providers.items():
        times = kernels_ms(provider.forward), kernels_ms(provider.gradients)
        row[f"{who}_kernels_ms"] = " ".join(f"{x:.4f}" for x in times)
    return row


def error_rows(case: Case, who: str, report: Report) -> Iterator[Mapping[str, object]]:
    """Ours and a peer's, on the same tensors."""
    if who == "fla":
        take_first_tiles()  # which tile it takes changes its time
    peer = fla(case.sample) if who == "fla" else partial(flash_qla(), **case.sample.options)
    for name, fn in (("ours", ours(case.sample)), (who, peer)):
        torch.manual_seed(0)
        found = errors(case, fn, report, heads=None)
        outs = [found.pop(n) for n in list(found) if is_output(n)]
        off = {"out error": f"{max(outs):.1e}", "grad error": f"{max(found.values()):.1e}"}
        yield {"work": case.title, "who": name, **off}


def against_length(sample: Sample, report: Report) -> Iterator[Mapping[str, object]]:
    """Rows by provider and length: 16 heads, one sequence."""
    width = 64 if sample.op == "chunk_rwkv7" else 128
    for T in TOKENS[:1] if report.options.small else TOKENS:
        shape = report.shape(Shape(B=1, T=T, H=16, K=width, V=width))
        args = sample.inputs(shape, DEVICE)
        providers = {"slipstream": Provider(ours(sample), args)}
        if report.options.peer == "fla":
            try:
                peer = (
                    ("cuDNN", sdpa(True, SDPBackend.CUDNN_ATTENTION))
                    if sample.op == "attention"
                    else ("fla", fla(sample))
                )
                providers[peer[0]] = Provider(peer[1], args)
            except ImportError as e:
                print(f"{sample.op}: {e}")
        calls: dict[str, dict[str, Any]] = {
            "fwd_ms": {who: x.forward for who, x in providers.items()},
            "both_ms": {who: x.gradients for who, x in providers.items()},
        }
        peaks = {who: peak_bytes(x.gradients) / 2**20 for who, x in providers.items()}
        if report.options.once:
            continue
        times = {n: in_turns(x, report.runs(20)) for n, x in calls.items()}
        for who, provider in providers.items():
            out = provider.forward()
            floors = provider.floors_ms(out)
            cells = {n: x[who] for n, x in times.items()}
            cells |= {"floor_fwd_ms": floors[0], "floor_both_ms": floors[1]}
            cells |= {"peak_mib": peaks[who], "results_mib": (provider.nbytes + out.nbytes) / 2**20}
            yield {"operator": family(sample.op), "who": who, "T": T} | rounded(cells)


def beyond(provider: Provider) -> dict[str, object]:
    """Peaks of a forward, and of one with backward, beyond inputs and results."""
    kept: list[Tensor | None] = []

    def forward() -> None:
        with torch.no_grad():
            kept[:] = provider.outputs()

    def both() -> None:
        kept[:] = provider.outputs()
        assert kept[0] is not None
        kept.extend(provider.back(kept[0]))

    found: dict[str, object] = {}
    for name, call in (("forward", forward), ("both", both)):
        for _ in range(2):  # the first call compiles, and may remember what it made
            call()
            kept.clear()
        peak = peak_bytes(call)
        size = sum(x.nbytes for x in kept if x is not None)
        held = provider.nbytes + size
        if name == "both" and provider.dout is not None:
            held += provider.dout.nbytes
        kept.clear()
        found[f"{name} MiB"] = round((peak - size) / 2**20)
        found[f"{name} %"] = round(100 * (peak - size) / held, 1)
    return found


def memory_row(sample: Sample, name: str, shape: Shape, report: Report) -> dict[str, object]:
    """name: of FlashQLA's shape, "" for a row of an operator."""
    named = {"operator": family(sample.op), "shape": name} if name else {"operator": sample.op}
    cells: dict[str, object] = {**named, **({"shape": str(shape)} if shape.packed else {})}
    args, options = sample.inputs(report.shape(shape), DEVICE), {"output_final_state": not name}
    cells |= beyond(Provider(partial(ours(sample), **options), args))
    who = {"fla": "fla", "flash_qla": "FlashQLA"}.get(report.options.peer)
    if who is None:
        return cells
    try:
        peer = fla(sample) if who == "fla" else flash_qla()
        found = beyond(Provider(partial(peer, **options), args))
    except Exception as e:
        return cells | {"note": f"{who}: {type(e).__name__}: {str(e)[:80]}"}
    return cells | {f"{who} {x}": y for x, y in found.items()}


def by_position(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """transformers names its first three arguments otherwise."""
    return lambda q, k, v, **rest: fn(q, k, v, **rest, **options)


def beside_transformers(report: Report) -> None:
    """float32 on a CPU, queries and keys normalised inside, as the models do it. The machine may be
    shared: only the ratio of two medians means something."""
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    peers: dict[str, tuple[str, Any, Any]] = {
        "gated delta rule": (
            "gated_delta_rule",
            qwen.torch_chunk_gated_delta_rule,
            qwen.torch_recurrent_gated_delta_rule,
        ),
        "kda": ("kda", kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention),
    }
    for name, (op, chunk, recurrent) in peers.items():
        for way in ("forward", "forward + backward", "decoding step"):
            if not report.wants(f"{name} {way}"):
                continue
            step = way == "decoding step"
            shape = report.shape(
                Shape(B=1, T=1 if step else 2048, H=8, state=step, dtype=torch.float32)
            )
            sample = chosen([f"{'fused_recurrent' if step else 'chunk'}_{op}"])[0]
            args = sample.inputs(shape, torch.device("cpu"))
            options = {"use_qk_l2norm_in_kernel": True, "output_final_state": step}
            options |= {"initial_state": args.pop("initial_state", None)}
            mine = Provider(partial(sample.fn, **options), args)
            theirs = Provider(by_position(recurrent if step else chunk, **options), args)
            off = (mine.forward() - theirs.forward()).abs().max().item()
            assert off < 1e-4, f"{name}: differs from transformers by {off}"
            call = "gradients" if way.endswith("backward") else "forward"
            calls = {"ours": getattr(mine, call), "transformers": getattr(theirs, call)}
            if report.options.once:
                continue
            times = in_turns(calls, report.runs(900 if step else 9))
            row = {
                "work": f"{name} {way}",
                "shape": f"B1 T{shape.T} H{shape.H} K{shape.K} V{shape.V} float32",
            }
            row |= {f"{who}_ms": f"{ms:.3f}" for who, ms in times.items()}
            ratio = times["ours"] / times["transformers"]
            report.row("linear_cpu", {**row, "ratio": f"{ratio:.3f}"})


def warm(cases: Sequence[Case], options: Namespace) -> None:
    """The first call of every case, in processes side by side: they compile on the CPU's cores."""

    def one(case: Case) -> str:
        only = f"^{case.title}$"
        command = [sys.executable, __file__, "--once", "--only", only, "--peer", options.peer]
        left = None if options.seconds == float("inf") else options.seconds
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            return f"{only}: over {left:.0f} s"
        return (done.stdout if done.returncode == 0 else done.stderr).strip()[-300:]

    with ThreadPoolExecutor(len(cases) or 1) as pool:
        for line in pool.map(one, cases):
            print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--peer", choices=("fla", "flash_qla", "cpu", "none"), default="fla")
    options.add_argument("--lengths", action="store_true", help="against the number of tokens")
    options.add_argument("--errors", action="store_true", help="of ours and of the peer")
    options.add_argument("--memory", action="store_true", help="peaks beyond inputs and results")
    options.add_argument("--packed", action="store_true", help="of --memory")
    options.add_argument("--warm", action="store_true", help="only fill the caches")
    given = options.parse_args(argv)
    report = Report(given, needs_gpu=given.peer != "cpu")
    if given.peer == "cpu":
        beside_transformers(report)
        return
    qla = [Case("chunk_gated_delta_rule", *x) for x in FLASH_QLA_SHAPES.items()]
    cases = qla if given.peer == "flash_qla" else CASES
    works: list[Measurement] = []
    if given.warm:
        warm([x for x in cases if report.wants(x.title)], given)
        return
    if given.memory and cases is CASES:
        if given.peer == "fla":
            take_first_tiles()
        shape = PACKED if given.packed else PLAIN
        for op in dict.fromkeys(x.sample.op for x in CASES):
            measure = partial(memory_row, chosen([op])[0], "", shape, report)
            works.append((op, "memory_gpu", measure))
    elif given.lengths:
        for sample in (x for x in OPERATORS if x.name in AGAINST_LENGTH):
            works.append((family(sample.op), "lengths", partial(against_length, sample, report)))
    else:
        for x in cases:
            if given.memory:
                file, measure = "memory_gpu", partial(memory_row, x.sample, x.label, x.shape)
            elif given.errors:
                file, measure = "errors", partial(error_rows, x, given.peer)
            elif given.peer == "flash_qla":
                file, measure = "delta_peers", partial(beside_flash_qla, x.label, x.shape)
            else:
                file, measure = "linear_gpu_peers", partial(beside_fla, x)
            works.append((x.title, file, partial(measure, report=report)))
    report.measure(works)


if __name__ == "__main__":
    main()
