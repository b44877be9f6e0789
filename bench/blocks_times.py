"""How fast the blocks around attention are, ours beside torch, Liger and fla: see blocks_gpu.py.

Forward, backward and both are times of the device alone (ahead.py), taken in turns; "called" is
both as triton.testing.do_bench has it, where a slow host counts.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from ahead import in_turns
from record import record
from torch import Tensor

from slipstream.ops.activation import swiglu
from slipstream.ops.conv import short_convolution, short_convolution_update
from slipstream.ops.distill import linear_kl_div
from slipstream.ops.loss import cross_entropy, linear_cross_entropy
from slipstream.ops.norm import group_norm, l2_norm, layer_norm, rms_norm, rms_norm_gated
from slipstream.ops.rotary import rotary_embedding, rotary_tables

BF16 = torch.bfloat16
# of forward and of backward alone
TURNS = 41


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


@dataclass
class Work:
    """units: tensors of `numel` 16-bit elements that must move, forward and backward (0: not
    alone). rest: what a peer's call takes besides the inputs."""

    name: str
    numel: int
    units: tuple[int, int]
    inputs: list[Tensor]
    call: Callable[..., Tensor]
    rest: tuple[Tensor, ...] = ()


def liger() -> dict[str, Callable]:
    """By the name of the work."""
    from liger_kernel.transformers import functional as liger

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return liger.liger_layer_norm(x, w, torch.zeros_like(w), 1e-5)

    def residual(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        return liger.liger_fused_add_rms_norm(x, r, w, 1e-5, in_place=False)[0]

    return {
        "rms_norm": lambda x, w: liger.liger_rms_norm(x, w, 1e-5, in_place=False),
        "layer_norm": layer,
        "rms_norm+residual": residual,
        "cross_entropy": lambda x, target: liger.liger_cross_entropy(x, target),
        "linear_ce": lambda h, w, target: liger.liger_fused_linear_cross_entropy(h, w, target),
        "swiglu": liger.liger_swiglu,
    }


def hasten(tuner: Any) -> None:
    """fla's tuner takes seconds a kernel otherwise, and minutes to compile what spills most."""
    from triton.testing import do_bench

    tuner.do_bench = property(lambda self: partial(do_bench, warmup=2, rep=8))
    all_of = tuner.prune_configs

    def prune(self: Any, kwargs: dict) -> list:
        configs = all_of(self, kwargs)
        D = {**dict(self.nargs), **kwargs}.get("D", 0)
        most = max(c.num_warps for c in configs)
        return [c for c in configs if c.num_warps == most or c.num_warps * 2048 >= D]

    tuner.prune_configs = prune


def fla() -> dict[str, Callable]:
    from fla.modules import FusedCrossEntropyLoss
    from fla.modules.activations import swiglu as glu
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.fused_kl_div import fused_kl_div_loss
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
    from fla.modules.norm import layernorm as norms
    from fla.modules.norm.fused_norm_gate import rms_norm_gated as gated
    from fla.modules.norm.l2norm import l2norm
    from fla.modules.rotary import ops as rotary
    from triton.runtime.autotuner import Autotuner

    hasten(Autotuner)
    loss = FusedCrossEntropyLoss()
    rounded = cache(lambda table: table.to(BF16))
    return {
        "rms_norm": lambda x, w: norms.rms_norm(x, w, None, eps=1e-5),
        "layer_norm": lambda x, w: norms.layer_norm(x, w, None, eps=1e-5),
        "rms_norm+residual": lambda x, r, w: norms.rms_norm(
            x, w, None, residual=r, eps=1e-5, prenorm=True
        )[0],
        "rms_norm_gated": lambda x, g, w: gated(x, g, w, None),
        "group_norm": lambda x, w: norms.group_norm(x, w, None, num_groups=32),
        "l2_norm": l2norm,
        "cross_entropy": loss,
        "linear_ce": lambda h, w, target: fused_linear_cross_entropy_loss(h, target, w),
        "linear_kl": lambda h, w, y, u: fused_kl_div_loss(h, y, w, u),
        "short_conv": lambda x, w: causal_conv1d(x, w, activation="silu")[0],
        "rotary": lambda x, *tables: rotary.rotary_embedding(x, *map(rounded, tables)),
        "swiglu": glu,
    }


def of_torch() -> dict[str, Callable]:
    def conv(x: Tensor, w: Tensor) -> Tensor:
        padded = F.pad(x.mT, (w.shape[1] - 1, 0))
        return F.silu(F.conv1d(padded, w[:, None], groups=w.shape[0])).mT

    def kl(h: Tensor, w: Tensor, y: Tensor, u: Tensor) -> Tensor:
        q, p = (F.log_softmax((x @ m.t()).float(), -1) for x, m in ((h, w), (y, u)))
        return F.kl_div(q, p, reduction="batchmean", log_target=True)

    return {
        "rms_norm": lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
        "layer_norm": lambda x, w: F.layer_norm(x, w.shape, w),
        "l2_norm": F.normalize,
        "cross_entropy": F.cross_entropy,
        "linear_ce": lambda h, w, target: F.cross_entropy(h @ w.t(), target),
        "linear_kl": kl,
        "short_conv": conv,
        "swiglu": lambda g, u: F.silu(g) * u,
    }


def providers(names: list[str]) -> dict[str, dict[str, Callable]]:
    """Those of the names that can be imported."""
    found = {}
    for name, load in (("torch", of_torch), ("liger", liger), ("fla", fla)):
        if name in names:
            try:
                found[name] = load()
            except Exception as fault:
                print(f"no {name}: {type(fault).__name__} {fault}"[:300], flush=True)
    return found


def norm(name: str, R: int, D: int) -> Work:
    x, w = rand(R, D, dtype=BF16), rand(D, dtype=BF16)
    label = f"{name} {R}x{D}"
    if name == "layer_norm":
        return Work(label, x.numel(), (2, 3), [x, w], layer_norm)
    if name == "rms_norm":
        return Work(label, x.numel(), (2, 3), [x, w], rms_norm)
    other = rand(R, D, dtype=BF16)
    if name == "rms_norm_gated":
        return Work(label, x.numel(), (3, 5), [x, other, w], rms_norm_gated)

    def residual(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        return rms_norm(x, w, residual=r, prenorm=True)[0]

    return Work(label, x.numel(), (4, 3), [x, other, w], residual)


def heads(name: str) -> Work:
    x = rand(8192, 32 * 128, dtype=BF16)
    if name == "l2_norm":
        return Work("l2_norm 262144x128", x.numel(), (2, 3), [x.view(-1, 128)], l2_norm)
    w, label = rand(4096, dtype=BF16), "group_norm 8192x32x128"
    return Work(label, x.numel(), (2, 3), [x, w], lambda x, w: group_norm(x, 32, w))


def loss(N: int, V: int, linear: bool) -> Work:
    target = torch.randint(0, V, (N,), device="cuda")
    if not linear:
        x = rand(N, V, dtype=BF16)
        return Work(f"cross_entropy {N}x{V}", N * V, (0, 2), [x, target], cross_entropy)
    given = [rand(N, 2048, dtype=BF16), 0.02 * rand(V, 2048, dtype=BF16), target]
    return Work(f"linear_ce {N}x{V}", 0, (0, 0), given, linear_cross_entropy)


def kl(N: int, V: int) -> Work:
    shapes = ((N, 2048), (V, 2048)) * 2
    h, w, *frozen = ((0.02 if n == V else 1) * rand(n, d) for n, d in shapes)
    given, frozen = [h.to(BF16), w.to(BF16)], tuple(x.to(BF16) for x in frozen)
    call = lambda h, w: linear_kl_div(h, w, *frozen)  # noqa: E731
    return Work(f"linear_kl {N}x{V}", 0, (0, 0), given, call, frozen)


def conv() -> Work:
    x, w = rand(4, 4096, 4096, dtype=BF16), rand(4096, 4, dtype=BF16)
    call = lambda x, w: short_convolution(x, w, activation="silu")[0]  # noqa: E731
    return Work("short_conv 4x4096x4096 W4", x.numel(), (2, 3), [x, w], call)


def turn() -> Work:
    x, (cos, sin) = rand(4, 4096, 32, 128, dtype=BF16), rotary_tables(torch.arange(4096), 128)
    tables = cos.cuda(), sin.cuda()
    call = lambda x: rotary_embedding(x, *tables)  # noqa: E731
    return Work("rotary 4x4096x32x128", x.numel(), (2, 2), [x], call, tables)


def glu() -> Work:
    given = [rand(16384, 8192, dtype=BF16) for _ in range(2)]
    return Work("swiglu 16384x8192", given[0].numel(), (3, 5), given, swiglu)


WORKS: dict[str, Callable[[], Work]] = {
    "rms_norm 32768x2048": partial(norm, "rms_norm", 32768, 2048),
    "layer_norm 32768x2048": partial(norm, "layer_norm", 32768, 2048),
    "rms_norm_gated 32768x2048": partial(norm, "rms_norm_gated", 32768, 2048),
    "rms_norm+residual 32768x2048": partial(norm, "rms_norm+residual", 32768, 2048),
    "rms_norm 8192x16384": partial(norm, "rms_norm", 8192, 16384),
    "rms_norm 2048x65536": partial(norm, "rms_norm", 2048, 65536),
    "l2_norm": partial(heads, "l2_norm"),
    "group_norm": partial(heads, "group_norm"),
    "short_conv": conv,
    "rotary": turn,
    "swiglu": glu,
    "cross_entropy 16384x32000": partial(loss, 16384, 32000, False),
    "cross_entropy 8192x151936": partial(loss, 8192, 151936, False),
    "linear_ce 16384x32000": partial(loss, 16384, 32000, True),
    "linear_ce 8192x151936": partial(loss, 8192, 151936, True),
    "linear_kl 8192x32000": partial(kl, 8192, 32000),
}


def calls(work: Work, found: dict[str, dict[str, Callable]]) -> Iterator[tuple[str, Callable]]:
    """Ours first."""
    yield "ours", work.call
    kind = work.name.split()[0]
    for who, known in found.items():
        if kind in known:
            yield who, lambda *inputs, call=known[kind]: call(*inputs, *work.rest)


def as_called(run: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    timed: Any = do_bench
    return timed(run, warmup=10, rep=40, return_mode="median")


def first(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


class Runs(NamedTuple):
    """forward and backward are None where they are not timed alone."""

    forward: Callable[[], Any] | None
    backward: Callable[[], Any] | None
    both: Callable[[], Any]


def ready(work: Work, who: str, call: Callable[..., Tensor]) -> tuple[dict[str, Any], Runs]:
    """The row, with the first call's time and the memory, and what is to be timed."""
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in work.inputs]
    wanted = [x for x in inputs if x.requires_grad]
    row: dict[str, Any] = {"work": work.name, "who": who, "fwd_ms": "", "fwd_tbs": ""}
    row |= {"bwd_ms": "", "bwd_tbs": "", "both_ms": "", "first_s": "", "peak_gib": ""}
    row |= {"beyond_gib": "", "called_ms": ""}

    def both() -> None:
        out = call(*inputs)
        torch.autograd.grad(out, wanted, None if out.dim() == 0 else dy)

    with torch.no_grad():
        dy = torch.randn_like(call(*inputs)) if work.units[0] else None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    row["first_s"] = f"{first(both):.2f}"
    peak = torch.cuda.max_memory_allocated() - before
    grads = sum(x.numel() * x.element_size() for x in wanted)
    row |= {"peak_gib": f"{peak / 2**30:.2f}", "beyond_gib": f"{(peak - grads) / 2**30:.2f}"}
    if not work.units[0]:
        return row, Runs(None, None, both)

    def forward() -> None:
        with torch.no_grad():
            call(*inputs)

    out = call(*inputs)
    return row, Runs(forward, lambda: torch.autograd.grad(out, wanted, dy, retain_graph=True), both)


def times(work: Work, found: dict[str, dict[str, Callable]], once: bool) -> list[dict[str, Any]]:
    """A row for each who can do the work; all take turns, call by call."""
    rows, runs = [], []
    for who, call in calls(work, found):
        try:
            row, run = ready(work, who, call)
        except Exception as fault:
            print(f"{work.name} {who}: {type(fault).__name__} {str(fault)[:150]}", flush=True)
            continue
        rows.append(row)
        runs.append(run)
    if once:
        return rows
    count = 20 if work.numel else 8
    for name, ms in zip(rows, in_turns([run.both for run in runs], count), strict=True):
        name["both_ms"] = f"{ms:.3f}"
    for row, run in zip(rows, runs, strict=True):
        row["called_ms"] = f"{as_called(run.both):.3f}"
    if not work.units[0]:
        return rows
    tb = work.numel * 2 / 1e9  # of one tensor, by ms
    for kind, units in zip(("forward", "backward"), work.units):
        alone = in_turns([getattr(run, kind) for run in runs], TURNS)
        for row, ms in zip(rows, alone, strict=True):
            row |= {f"{kind[0]}wd_ms": f"{ms:.4f}", f"{kind[0]}wd_tbs": f"{units * tb / ms:.2f}"}
    return rows


def all_times(peers: list[str], only: re.Pattern[str], once: bool) -> None:
    found = providers(peers)
    print(f"{'work':27} {'who':5}  fwd ms TB/s   bwd ms TB/s   both  called  first s peak beyond")
    for name, make in WORKS.items():
        if not only.search(name):
            continue
        work = make()
        rows = times(work, found, once)
        for row in rows:
            print(
                f"{row['work']:27} {row['who']:5} {row['fwd_ms']:>7} {row['fwd_tbs']:>4}  "
                f"{row['bwd_ms']:>7} {row['bwd_tbs']:>4}  {row['both_ms']:>7} "
                f"{row['called_ms']:>7} {row['first_s']:>6} {row['peak_gib']:>5} "
                f"{row['beyond_gib']:>5}",
                flush=True,
            )
        if rows and not once:
            record("blocks_gpu", rows)
        del work, rows
        torch.cuda.empty_cache()


def host_times() -> None:
    """Microseconds a call takes on the host, 200 of them without waiting for the device, the least
    of some rounds; to a CSV."""
    x, w = rand(4, 64, dtype=BF16), rand(64, dtype=BF16)
    grads = [t.clone().requires_grad_() for t in (x, w)]
    taps, state = rand(64, 4, dtype=BF16), rand(4, 64, 4, dtype=BF16)
    target = torch.zeros(4, dtype=torch.int64, device="cuda")
    cos, sin = (t.cuda() for t in rotary_tables(torch.arange(4), 16))
    logits = rand(4, 64, dtype=BF16).requires_grad_()
    each: dict[str, Callable[[], Any]] = {
        "rms_norm": lambda: rms_norm(x, w),
        "rms_norm saving": lambda: rms_norm(grads[0], grads[1]),
        "cross_entropy without gradient": lambda: cross_entropy(x, target),
        "F.rms_norm": lambda: F.rms_norm(x, (64,), w, 1e-5),
        "layer_norm": lambda: layer_norm(x, w),
        "short_convolution": lambda: short_convolution(x[None], taps, activation="silu"),
        "conv update": lambda: short_convolution_update(x, state, taps, activation="silu"),
        "cross_entropy": lambda: cross_entropy(logits, target),
        "rotary": lambda: rotary_embedding(x.view(1, 4, 4, 16), cos, sin),
        "swiglu": lambda: swiglu(x, x),
    }
    rows = []
    for name, call in each.items():
        for _ in range(20):
            call()
        best = float("inf")
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                call()
            best = min(best, (time.perf_counter() - start) * 5e3)
        torch.cuda.synchronize()
        rows.append({"operator": name, "us": f"{best:.1f}"})
    print("host us a call:", ", ".join(f"{r['operator']} {r['us']}" for r in rows), flush=True)
    record("host_gpu", rows)
