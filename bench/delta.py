"""KDA and the gated delta rule beside other packages' kernels, as far as they are installed.

    python bench/delta.py                        both operators, all shapes and gates
    python bench/delta.py --peers cudnn          beside cuDNN alone
    python bench/delta.py --only 'gdn.*[0]'

bf16, K = V = 128, gates and beta in float32. Shapes are sequences, which are packed, their tokens,
and heads, those of q and k before those of v. forward_ms: of a CUDA graph of a forward without
gradients; both_ms: of a forward with backward, as a user calls it; host_us: until a forward
returns. error: of o against float64, two heads of all tokens, relative root mean square. What a
peer refuses, such as a backward, is an empty cell. The gated delta rule returns its last states.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from harness import DEVICE, Provider, Report, error, host_us, in_graph, in_turns, parser
from torch import Tensor

from slipstream import ops
from slipstream.runtime import compile_ahead
from slipstream.tools.catalog import Shape

HEADS_CHECKED = 2
# before each run, about 0.06 ms each on an H200
FLUSHES = 8


def packed(n: int, tokens: int, H: int, HV: int | None = None) -> Shape:
    return Shape(B=1, T=n * tokens, H=H, HV=HV, lengths=(tokens,) * n if n > 1 else None)


SHAPES = {
    "kda": {
        "1x2048x12": packed(1, 2048, 12),
        "1x8192x16": packed(1, 8192, 16),
        "1x8192x96": packed(1, 8192, 96),
        "8x1024x32": packed(8, 1024, 32),
    },
    "gdn": {
        f"{n}x{tokens} {H}/{HV}": packed(n, tokens, H, HV)
        for n, tokens, heads in (
            (1, 2048, [(16, 32)]),
            (1, 8192, [(16, 64)]),
            (1, 32768, [(2, 8)]),
            (4, 8192, [(16, 64), (16, 32)]),
            (8, 1024, [(16, 64), (16, 32), (8, 24)]),
        )
        for H, HV in heads
    },
}
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "[-0.1,0]": lambda x: -0.1 * torch.rand_like(x),
    "-1 sigmoid": lambda x: -torch.sigmoid(x),
    "-5 sigmoid": lambda x: -5 * torch.sigmoid(x),
}


@cache
def offsets(*lengths: int) -> Tensor:
    """Of packed sequences; made once, so that no peer's time has it."""
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


@lru_cache(1)
def linear(g: Tensor, cu: Tensor) -> tuple[Tensor, Tensor]:
    """Gates and offsets as FlashInfer takes them; made once, so that its time has them not."""
    return g[0].exp(), cu.long()


def cudnn() -> Callable[..., Any]:
    from cudnn.linear_attention.ops import kimi_delta_attention

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Any) -> Tensor:
        cu = offsets(q.shape[1]) if cu_seqlens is None else cu_seqlens
        made = kimi_delta_attention(q[0], k[0], v[0], g[0], beta[0], cu)
        return (made[0] if isinstance(made, tuple) else made)[None]

    return run


def flashinfer() -> Callable[..., Any]:
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Any, **options: Any
    ) -> Tensor:
        g, cu = linear(g, offsets(q.shape[1]) if cu_seqlens is None else cu_seqlens)
        beta = beta[0]
        return chunk_gated_delta_rule(q[0], k[0], v[0], g, beta, cu_seqlens=cu, **options)[0][None]

    return run


def peer(module: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(module), name)


FILES = {"kda": "kda_peers", "gdn": "gdn_peers"}
GDN = "chunk_gated_delta_rule"
PEERS: dict[str, dict[str, Callable[[], Callable[..., Any]]]] = {
    "kda": {
        "slipstream": lambda: ops.chunk_kda,
        "cudnn": cudnn,
        "fla": partial(peer, "fla.ops.kda", "chunk_kda"),
    },
    "gdn": {
        "slipstream": lambda: ops.chunk_gated_delta_rule,
        "flashinfer": flashinfer,
        "flash_qla": partial(peer, "flash_qla", GDN),
        "fla": partial(peer, "fla.ops.gated_delta_rule", GDN),
    },
}


def arguments(operator: str, shape: Shape, gates: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    make: dict[str, Any] = {"device": DEVICE, "dtype": shape.dtype}
    T, HV = shape.dims()["T"], shape.HV or shape.H
    q, k = (F.normalize(torch.randn(1, T, shape.H, shape.K, **make), dim=-1) for _ in "qk")
    size = (1, T, HV, shape.K) if operator == "kda" else (1, T, HV)
    return {
        "q": q,
        "k": k,
        "v": torch.randn(1, T, HV, shape.V, **make),
        "g": gates(torch.randn(size, device=DEVICE)),
        "beta": torch.rand(size[:3], device=DEVICE),
        "cu_seqlens": offsets(*shape.lengths) if shape.lengths else None,
        **({} if operator == "kda" else {"output_final_state": True}),
    }


def exact(operator: str, args: Mapping[str, Any]) -> Tensor:
    """Of the first heads of v."""
    share = args["v"].shape[2] // args["q"].shape[2]
    some = {
        n: x[:, :, : -(-HEADS_CHECKED // share) if n in "qk" else HEADS_CHECKED].double()
        for n, x in args.items()
        if n in ("q", "k", "v", "g", "beta")
    }
    fn = PEERS[operator]["slipstream"]()
    return fn(**some, cu_seqlens=args["cu_seqlens"], impl="eager")[0]


def rows(
    operator: str,
    name: str,
    gates: str,
    peers: Mapping[str, Callable[..., Any]],
    report: Report,
) -> Iterator[Mapping[str, object]]:
    shape = report.shape(SHAPES[operator][name])
    torch.manual_seed(0)
    args = arguments(operator, shape, GATES[gates])
    want = exact(operator, args)
    found: dict[str, dict[str, object]] = {}
    calls: dict[str, dict[str, Any]] = {"forward_ms": {}, "both_ms": {}}
    for who, fn in peers.items():
        provider = Provider(fn, args)
        cells = found[who] = {"shape": name, "gates": gates, "who": who}
        with report.going_on(f"{name} {gates} {who}"):
            got = provider.forward()[:, :, :HEADS_CHECKED]
            cells["error"] = f"{error(got, want):.1e}"
            calls["forward_ms"][who] = in_graph(provider.forward)
            compile_ahead.finish()
            if not report.options.once:
                cells["host_us"] = round(host_us(provider.forward, report.runs(20)), 1)
        try:
            provider.gradients()
            calls["both_ms"][who] = provider.gradients
        except (NotImplementedError, RuntimeError) as e:
            print(f"{who}: no backward: {str(e)[:80]}")
    for column, those in calls.items():
        compile_ahead.finish()
        times = {} if report.options.once else in_turns(those, report.runs(20), FLUSHES)
        for who, ms in times.items():
            found[who][column] = round(ms, 4)
    columns = ("shape", "gates", "who", "forward_ms", "both_ms", "host_us", "error")
    for cells in found.values():
        yield {column: cells.get(column, "") for column in columns}


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    known = sorted({who for peers in PEERS.values() for who in peers} - {"slipstream"})
    options.add_argument("--peers", nargs="*", default=known, choices=known)
    report = Report(options.parse_args(argv))
    cases = []
    for operator, loaders in PEERS.items():
        peers: dict[str, Callable[..., Any]] = {}
        for who, load in loaders.items():
            if who in ("slipstream", *report.options.peers):
                try:
                    peers[who] = load()
                except ImportError as e:
                    print(f"{who} is left out: {e}")
        cases += [
            (
                f"{operator} {name} {gates}",
                FILES[operator],
                partial(rows, operator, name, gates, peers, report),
            )
            for name in SHAPES[operator]
            for gates in GATES
        ]
    report.measure(cases)


if __name__ == "__main__":
    main()
