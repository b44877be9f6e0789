"""KDA beside cuDNN's and fla's, as far as they are installed.

    python bench/kda.py                      all shapes and gates
    python bench/kda.py --peers cudnn        beside cuDNN alone
    python bench/kda.py --only '96.*-5'

bf16, K = V = 128, gates and beta in float32; 8x1024x32 are 8 packed sequences. forward_ms: of a
CUDA graph of a forward without gradients; both_ms: of a forward with backward, as a user calls it;
host_us: until a forward returns. error: of o against float64, two heads of all tokens, relative
root mean square. What a peer refuses, such as a backward, is an empty cell.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
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
SHAPES = {
    "1x2048x12": Shape(B=1, T=2048, H=12),
    "1x8192x16": Shape(B=1, T=8192, H=16),
    "1x8192x96": Shape(B=1, T=8192, H=96),
    "8x1024x32": Shape(B=1, T=8192, H=32, lengths=(1024,) * 8),
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


def slipstream() -> Callable[..., Any]:
    return ops.chunk_kda


def cudnn() -> Callable[..., Any]:
    from cudnn.linear_attention.ops import kimi_delta_attention

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Any) -> Tensor:
        cu = offsets(q.shape[1]) if cu_seqlens is None else cu_seqlens
        made = kimi_delta_attention(q[0], k[0], v[0], g[0], beta[0], cu)
        return (made[0] if isinstance(made, tuple) else made)[None]

    return run


def fla() -> Callable[..., Any]:
    from fla.ops.kda import chunk_kda

    return chunk_kda


PEERS = {"slipstream": slipstream, "cudnn": cudnn, "fla": fla}


def arguments(shape: Shape, gates: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    make: dict[str, Any] = {"device": DEVICE, "dtype": shape.dtype}
    size = (1, shape.dims()["T"], shape.H, shape.K)
    q, k, v = (torch.randn(size, **make) for _ in range(3))
    return {
        "q": F.normalize(q, dim=-1),
        "k": F.normalize(k, dim=-1),
        "v": v,
        "g": gates(torch.randn(size, device=DEVICE)),
        "beta": torch.rand(size[:3], device=DEVICE),
        "cu_seqlens": offsets(*shape.lengths) if shape.lengths else None,
    }


def exact(args: Mapping[str, Any]) -> Tensor:
    few = {n: x[:, :, :HEADS_CHECKED].double() for n, x in args.items() if n != "cu_seqlens"}
    return ops.chunk_kda(**few, cu_seqlens=args["cu_seqlens"], impl="eager")[0]


def rows(
    name: str, gates: str, peers: Mapping[str, Callable[..., Any]], report: Report
) -> Iterator[Mapping[str, object]]:
    shape = report.shape(SHAPES[name])
    torch.manual_seed(0)
    args = arguments(shape, GATES[gates])
    want = exact(args)
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
    options.add_argument("--peers", nargs="*", default=["cudnn", "fla"], choices=[*PEERS][1:])
    report = Report(options.parse_args(argv))
    peers: dict[str, Callable[..., Any]] = {}
    for who in ("slipstream", *report.options.peers):
        try:
            peers[who] = PEERS[who]()
        except ImportError as e:
            print(f"{who} is left out: {e}")
    report.measure(
        (f"{name} {gates}", "kda_peers", partial(rows, name, gates, peers, report))
        for name in SHAPES
        for gates in GATES
    )


if __name__ == "__main__":
    main()
