"""Norms, losses, short convolution, selective scan, rotary embedding and gated activations beside
their peers.

    python bench/blocks.py               beside torch, Liger and fla, as far as they are installed
    python bench/blocks.py --compile     under torch.compile: our kernel in the graph, and the code
                                         that Inductor makes of plain torch
    python bench/blocks.py --errors      against plain torch in float64, where it has the function

bf16. fwd_ms, bwd_ms, both_ms: of the device, all providers in turns; TB/s of what must move at
least. peak_gib, beyond_gib: memory of a forward and its backward, and without the gradients.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from harness import (
    BF16,
    DEVICE,
    Measurement,
    Provider,
    Report,
    first,
    float64_errors,
    in_turns,
    parser,
    peak_bytes,
)
from torch import Tensor

from slipstream import ops
from slipstream.tools.catalog import Sample, Shape


@dataclass(frozen=True)
class Work:
    """A call of an operator. The name's first word is the kind by which peers know it; the sample's
    tensors, in order, are what they take. units: tensors as large as the first that must move,
    forward and backward; (0, 0): it is a loss, whose forward is not timed alone."""

    name: str
    sample: Sample
    shape: Shape
    units: tuple[float, float] = (0, 0)

    @property
    def kind(self) -> str:
        return self.name.split()[0]


def _rows(T: int, **sizes: Any) -> Shape:
    return Shape(B=1, T=T, **sizes)


_NORM, _GLU = "x=BTD weight=D:one", "gate=BTC up=BTC"
_SELECTIVE = "u=BTD delta=BTD A=DM:rate B=BTM C=BTM D=D z=BTD delta_bias=D"
_KL = "student=TD student_weight=ZD teacher=TD teacher_weight=ZD"
_WIDE = _rows(32768, D=2048)
GATED = Sample("rms_norm_gated", "x=BTD gate=BTD weight=D:one")
ADDED = Sample("rms_norm", "x=BTD residual=BTD weight=D:one", options={"prenorm": True})
GROUPS = Sample("group_norm", _NORM, options={"num_groups": 32})
CONV = Sample("short_convolution", "x=BTD weight=DW", options={"activation": "silu"})
ROTARY = Sample("rotary_embedding", "x=BTHK cos=TP sin=TP", fixed="cos sin")
SCAN = Sample("selective_scan", _SELECTIVE, options={"delta_softplus": True})
MHC_PRE = Sample("mhc_pre", "streams=BT4D weight=UI:state base=U:state scale=3:state")
MHC_POST = Sample("mhc_post", "streams=BT4D y=BTD post=BT4:sum comb=BT44:sum")
LOSS = Sample("cross_entropy", "logits=TZ target=T:targets")
LINEAR = Sample("linear_cross_entropy", "hidden=TD weight=ZD target=T:targets")
KL = Sample("linear_kl_div", _KL, fixed="teacher teacher_weight")
WORKS = [
    Work("rms_norm 32768x2048", Sample("rms_norm", _NORM), _WIDE, (2, 3)),
    Work("layer_norm 32768x2048", Sample("layer_norm", _NORM), _WIDE, (2, 3)),
    Work("rms_norm_gated 32768x2048", GATED, _WIDE, (3, 5)),
    Work("rms_norm+residual 32768x2048", ADDED, _WIDE, (4, 3)),
    Work("rms_norm 8192x16384", Sample("rms_norm", _NORM), _rows(8192, D=16384), (2, 3)),
    Work("rms_norm 2048x65536", Sample("rms_norm", _NORM), _rows(2048, D=65536), (2, 3)),
    Work("l2_norm 262144x128", Sample("l2_norm", "x=BTHK"), _rows(8192, H=32), (2, 3)),
    Work("group_norm 8192x32x128", GROUPS, _rows(8192, D=4096), (2, 3)),
    Work("short_conv 4x4096x4096 W4", CONV, Shape(B=4, T=4096, D=4096), (2, 3)),
    Work("rotary 4x4096x32x128", ROTARY, Shape(B=4, T=4096, H=32), (2, 2)),
    *(
        Work(f"selective_scan {b}x{t}x4096 N16", SCAN, Shape(B=b, T=t, D=4096, M=16), (4, 7))
        for b, t in ((8, 2048), (1, 2048), (1, 16384))
    ),
    Work("mhc_pre 8192x4x4096", MHC_PRE, _rows(8192, D=4096), (1.25, 2.25)),
    Work("mhc_post 8192x4x4096", MHC_POST, _rows(8192, D=4096), (2.25, 3.5)),
    Work("swiglu 16384x8192", Sample("swiglu", _GLU), _rows(16384, C=8192), (3, 5)),
    Work("token_shift 16384x4096", Sample("token_shift", "x=BTD"), _rows(16384, D=4096), (2, 2)),
    Work("cross_entropy 16384x32000", LOSS, _rows(16384, Z=32000)),
    Work("cross_entropy 8192x151936", LOSS, _rows(8192, Z=151936)),
    Work("linear_ce 16384x32000", LINEAR, _rows(16384, D=2048, Z=32000)),
    Work("linear_ce 8192x151936", LINEAR, _rows(8192, D=2048, Z=151936)),
    Work("linear_kl 8192x32000", KL, _rows(8192, D=2048, Z=32000)),
]


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
        "l2_norm": partial(F.normalize, dim=-1),
        "cross_entropy": F.cross_entropy,
        "linear_ce": lambda h, w, target: F.cross_entropy(h @ w.t(), target),
        "linear_kl": kl,
        "short_conv": conv,
        "swiglu": lambda g, u: F.silu(g) * u,
        "token_shift": lambda x: F.pad(x[:, :-1], (0, 0, 1, 0)),
        "mhc_pre": partial(ops.mhc_pre, impl="eager"),
        "mhc_post": partial(ops.mhc_post, impl="eager"),
    }


def liger() -> dict[str, Callable]:
    from liger_kernel.transformers import functional as liger

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return liger.liger_layer_norm(x, w, torch.zeros_like(w), 1e-5)

    def residual(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        return liger.liger_fused_add_rms_norm(x, r, w, 1e-5, in_place=False)[0]

    return {
        "rms_norm": lambda x, w: liger.liger_rms_norm(x, w, 1e-5, in_place=False),
        "layer_norm": layer,
        "rms_norm+residual": residual,
        "cross_entropy": liger.liger_cross_entropy,
        "linear_ce": liger.liger_fused_linear_cross_entropy,
        "swiglu": liger.liger_swiglu,
    }


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
    from fla.modules.token_shift import token_shift

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
        "cross_entropy": FusedCrossEntropyLoss(),
        "linear_ce": lambda h, w, target: fused_linear_cross_entropy_loss(h, target, w),
        "linear_kl": lambda h, w, y, u: fused_kl_div_loss(h, y, w, u),
        "short_conv": lambda x, w: causal_conv1d(x, w, activation="silu")[0],
        "rotary": lambda x, *tables: rotary.rotary_embedding(x, *map(rounded, tables)),
        "swiglu": glu,
        "token_shift": token_shift,  # it subtracts x, which costs nothing more
    }


def peers(names: Sequence[str]) -> dict[str, dict[str, Callable]]:
    """Those of the names that are installed: by name, what they have by kind of work."""
    found = {}
    for name in names:
        try:
            found[name] = {"torch": of_torch, "liger": liger, "fla": fla}[name]()
        except ImportError as e:
            print(f"{name}: {e}")
    return found


def by_name(fn: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """fn, which takes its arguments by position, called by name."""
    return lambda **args: fn(*(args[n] for n in names))


def providers(work: Work, known: Mapping[str, Mapping[str, Callable]], report: Report) -> dict:
    """Ours first."""
    shape = report.shape(work.shape)
    if report.options.small and work.kind == "group_norm":
        shape = replace(shape, D=64)
    args = work.sample.inputs(shape, DEVICE)
    fixed, names = work.sample.fixed, list(args)
    found = {"ours": Provider(partial(work.sample.fn, **work.sample.options), args, fixed)}
    for who, kinds in known.items():
        if work.kind in kinds:
            found[who] = Provider(by_name(kinds[work.kind], names), args, fixed)
    return found


@contextmanager
def ours_only(work: Work, who: str) -> Iterator[None]:
    """A peer's error is printed, ours is raised."""
    try:
        yield
    except Exception as e:
        if who == "ours":
            raise
        print(f"{work.name} {who}: {type(e).__name__}: {str(e)[:150]}")


def beside_peers(
    work: Work, known: Mapping[str, Mapping[str, Callable]], report: Report
) -> list[dict[str, object]]:
    """A row for each who can do the work."""
    rows: dict[str, dict[str, object]] = {}
    able: dict[str, Provider] = {}
    for who, provider in providers(work, known, report).items():
        with ours_only(work, who):
            seconds, peak = first(provider.gradients), peak_bytes(provider.gradients)
            able[who] = provider
        if who not in able:
            continue
        beyond = peak - sum(x.nbytes for x in provider.live.values())
        rows[who] = {"work": work.name, "who": who, "first_s": f"{seconds:.2f}"}
        rows[who] |= {"peak_gib": f"{peak / 2**30:.2f}", "beyond_gib": f"{beyond / 2**30:.2f}"}
    if report.options.once:
        return list(rows.values())
    both = in_turns({who: x.gradients for who, x in able.items()}, report.runs(20))
    for who, ms in both.items():
        rows[who]["both_ms"] = f"{ms:.3f}"
    moved = next(iter(able["ours"].args.values())).nbytes
    alone = (
        ("fwd", {who: x.forward for who, x in able.items()}, work.units[0]),
        ("bwd", {who: x.backward() for who, x in able.items()}, work.units[1]),
    )
    for way, calls, units in alone if work.units[0] else ():
        for who, ms in in_turns(calls, report.runs(41)).items():
            speed = units * moved / ms / 1e9
            rows[who] |= {f"{way}_ms": f"{ms:.4f}", f"{way}_tbs": f"{speed:.2f}"}
    return list(rows.values())


def error_rows(
    work: Work, known: Mapping[str, Mapping[str, Callable]], report: Report
) -> Iterator[Mapping[str, object]]:
    """A row for each who can do the work; none where plain torch cannot."""
    exact = of_torch().get(work.kind)
    if exact is None:
        return
    for who, provider in providers(work, known, report).items():
        with ours_only(work, who):
            off = float64_errors(provider, by_name(exact, list(provider.args)))
            yield {"work": work.name, "who": who, **off}


def under_compile(work: Work, report: Report) -> dict[str, object]:
    """Milliseconds of a forward with backward: not compiled, compiled, and Inductor's own code."""
    given = providers(work, {}, report)["ours"]
    calls = {}
    ways = (("eager", None, False), ("compiled", None, True), ("inductor", "eager", True))
    for who, impl, compiled in ways:
        torch.compiler.reset()
        fn = partial(given.fn, impl=impl)
        fn = torch.compile(fn, fullgraph=True, dynamic=False) if compiled else fn
        provider = Provider(fn, given.args, work.sample.fixed)
        provider.gradients()
        calls[who] = provider.gradients
    if report.options.once:
        return {"work": work.name}
    times = in_turns(calls, report.runs(20))
    return {"work": work.name, **{f"{who}_ms": f"{ms:.3f}" for who, ms in times.items()}}


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--peers", nargs="*", default=["torch", "liger", "fla"])
    options.add_argument("--compile", action="store_true", help="under torch.compile")
    options.add_argument("--errors", action="store_true", help="against float64, no times")
    given = options.parse_args(argv)
    report, works = Report(given), list[Measurement]()
    if given.compile:
        works = [(x.name, "blocks_compiled", partial(under_compile, x, report)) for x in WORKS]
    else:
        known = peers(given.peers)
        file, rows = ("errors", error_rows) if given.errors else ("blocks_gpu", beside_peers)
        works = [(x.name, file, partial(rows, x, known, report)) for x in WORKS]
    report.measure(works)


if __name__ == "__main__":
    main()
