"""Attention to selected keys beside our dense attention, flex_attention and plain torch.

    python bench/selected.py [--only 'msa local 32768'] [--seconds 150]

    msa   64 query heads on 4, 128 wide, each of the 4 with lists of 16 blocks of 128 keys
    qsa   24 query heads on 2, 256 wide, one list of 512 blocks of 4 keys, and the open block
    dsa   128 heads, 192 and 128 wide, one list of 2,048 keys; latents: as 576 and 512 numbers of
          one key, forward

local: an entry is drawn again every 6 queries, each at its own turn, so that 8 queries' lists have
about twice the keys of one, as trained indexers' have (selected_overlap.csv). random: every query.
share: TFLOP/s on the pairs that are seen, over those of our dense causal attention in the same run.
memory: the peak of a forward with backward over what is alive: q, k, v, o, their gradients, the
lists and as much for their inverse.
errors: of o and dq of the last queries, against float64, relative.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from harness import BF16, DEVICE, Measurement, Provider, Report, error, parser, peak_bytes
from torch import Tensor

from slipstream import ops
from slipstream.kernels.attention import reference
from slipstream.kernels.selected_attention.inputs import SelectedOptions, visible

# H, HKV, D, DV, lists' heads, entries, block, tail
KINDS = {
    "msa": (64, 4, 128, 128, 4, 16, 128, False),
    "qsa": (24, 2, 256, 256, 1, 512, 4, True),
    "dsa": (128, 128, 192, 128, 1, 2048, 1, False),
    "dsa latents": (128, 1, 576, 512, 1, 2048, 1, False),
}
LENGTHS = (32768, 65536, 131072, 8192, 262144)
SLICE = 64
FLEX = ("flex", "msa", 32768)
MOST_DENSE = 131072  # tokens: later it takes half a minute
DENSE: dict[tuple[str, int], tuple[float, float]] = {}  # pairs a millisecond


def lists(T: int, G: int, entries: int, block: int, tail: bool, every: int) -> Tensor:
    """[1, T, G, entries] of blocks that are over; the first entry is the own block without tail."""
    t = torch.arange(T, device=DEVICE)[:, None]
    epoch = (t + torch.arange(entries, device=DEVICE)) // every  # [T, entries]
    drawn = torch.rand(G, int(epoch[-1].max()) + 1, entries, device=DEVICE)
    drawn = drawn.gather(1, epoch.expand(G, T, entries))
    begun = ((epoch * every - entries).clamp(min=0) // block).clamp(min=1)
    found = (drawn * begun).int()
    if not tail:
        found[:, :, 0] = (t[:, 0] // block).int()
    return found.transpose(0, 1)[None].contiguous()


def sliced(args: Mapping[str, Any], options: Mapping[str, Any], T: int) -> tuple[Tensor, int]:
    """What the last queries see [1, G, SLICE, T], and about how many pairs all queries see."""
    at = torch.arange(0, T, max(T // 512, 1), device=DEVICE)
    pairs = 0
    for rows in (*at.split(SLICE), torch.arange(T - SLICE, T, device=DEVICE)):
        k = torch.arange(T, device=DEVICE)[None]
        where = reference.Positions(rows[None] * 0, rows[None], rows[None], k * 0, k)
        how = SelectedOptions(1.0, -1, 0, True, options["block"], options["tail"])
        seen = visible(where, args["selected"][:, rows], T, how)
        pairs += int(seen.sum()) * (rows[-1] != T - 1 or len(rows) < SLICE)
    heads = args["q"].shape[2] // seen.shape[2]
    return seen.transpose(1, 2), pairs * T // len(at) * heads


def exact(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """o of the last queries in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    heads = q.unflatten(2, (k.shape[2], -1))
    x = torch.einsum("btgrd,bsgd->bgrts", heads, k) * q.shape[-1] ** -0.5
    x = x.masked_fill(~seen[:, :, None], -torch.inf)
    return torch.einsum("bgrts,bsgd->btgrd", x.softmax(-1), v).flatten(2, 3)


def flex(args: Mapping[str, Any], block: int) -> Any:
    """flex_attention with a mask of the lists, compiled; its block mask is made before."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    selected, (_, T, H, _) = args["selected"][0], args["q"].shape
    table = torch.zeros(*selected.transpose(0, 1).shape[:2], -(-T // block), device=DEVICE).bool()
    table.scatter_(2, selected.transpose(0, 1).long(), True)
    group = H // table.shape[0]

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return table[h // group, q, kv // block] & (kv <= q)

    blocks = torch.compile(create_block_mask)(mask, None, H, T, T, device=DEVICE)
    compiled = torch.compile(flex_attention)

    def run(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=blocks, enable_gqa=True).transpose(1, 2)

    return run


def dense(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    return ops.attention(q, k, v)


def latents(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, **_: Any) -> Tensor:
    own = {"width": v.shape[-1], "scale": q.shape[-1] ** -0.5, "selected": selected[:, :, 0]}
    return ops.latent_attention(q, k[:, :, 0], **own)


def rows(kind: str, name: str, T: int, who: str, report: Report) -> Iterator[Mapping[str, object]]:
    H, HKV, D, DV, G, entries, block, tail = KINDS[kind]
    trains = kind != "dsa latents"
    if report.options.small:
        T, H, D, DV, entries = 256, 2 * HKV if HKV < 9 else H, 16, 16, 3
    dtype = BF16 if DEVICE.type == "cuda" else torch.float32
    shapes = {"q": (1, T, H, D), "k": (1, T, HKV, D), "v": (1, T, HKV, DV)}
    args: dict[str, Any] = {n: torch.randn(x, device=DEVICE).to(dtype) for n, x in shapes.items()}
    if not trains:
        args["v"] = args["k"][..., :DV]
    args["selected"] = lists(T, G, entries, block, tail, 1 if name == "random" else 6)
    options = {"block": block, "tail": tail}
    makes: dict[str, Any] = {
        "ours": lambda: partial(ops.attention, **options) if trains else latents,
        "eager": lambda: partial(ops.attention, **options, impl="eager"),
        "flex": lambda: flex(args, block),
    }
    calls = {who: makes[who]()}
    if trains and (kind, T) not in DENSE and T <= MOST_DENSE:
        calls["dense"] = dense
    seen, pairs = sliced(args, options, T)
    found = []
    for who, fn in calls.items():
        provider = Provider(fn, args)
        with report.going_on(f"{kind} {name} {T} {who}"):
            ways = {"forward": provider.forward, "both": provider.gradients}
            times = report.times(
                ways if trains else {"forward": provider.forward}, runs_of(kind, T, who)
            )
            cells: dict[str, object] = {"kind": kind, "lists": name, "T": T, "who": who}
            cells |= {f"{way}_ms": f"{ms:.4g}" for way, ms in times.items()}
            work = pairs if who != "dense" else T * (T + 1) // 2 * H
            speeds = work / times.get("forward", 1.0), work / times.get("both", 1.0)
            if who == "dense":
                DENSE[kind, T] = speeds
            cells["tflops"] = f"{speeds[0] * 2 * (D + DV) / 1e9:.4g}"
            cells |= errors(provider, seen, trains)
            if trains:
                provider.forward()
                given = [x for n, x in args.items() if who != "dense" or n != "selected"]
                held = sum(x.nbytes for x in given) + args["v"].nbytes // HKV * H
                peak = held + peak_bytes(provider.gradients)
                cells["peak_GiB"] = f"{(peak - held) / 2**30:.3f}"
                cells["memory"] = f"{peak / (2 * held):.3f}" if DEVICE.type == "cuda" else ""
            found.append((cells, speeds))
    for cells, speeds in found:
        if (kind, T) in DENSE:
            share = [x / y for x, y in zip(speeds, DENSE[kind, T])]
            cells |= {"forward_share": f"{share[0]:.3f}", "both_share": f"{share[1]:.3f}"}
        yield cells


def runs_of(kind: str, T: int, who: str) -> int:
    return 6 if T <= 65536 and who != "eager" and kind != "dsa" else 2


def errors(provider: Provider, seen: Tensor, trains: bool) -> dict[str, object]:
    """Of o and dq of the last queries."""
    if seen.shape[-1] > MOST_DENSE or provider.fn is dense:
        return {}
    last = {n: x[:, -SLICE:] if n == "q" else x for n, x in provider.live.items()}
    if not trains:
        last["v"] = last["k"][..., : provider.args["v"].shape[-1]]
        with torch.no_grad():
            right = exact(**last, seen=seen)
            return {"o_error": f"{error(provider.forward()[:, -SLICE:], right):.1e}"}
    right = exact(**last, seen=seen)
    out = provider.outputs()[0]
    dq = provider.back(out)[0]
    assert provider.dout is not None and dq is not None
    dout = provider.dout[:, -SLICE:].double()
    want = torch.autograd.grad(right, provider.live["q"], dout)[0][:, -SLICE:]
    both = error(out[:, -SLICE:], right), error(dq[:, -SLICE:], want)
    return dict(zip(("o_error", "dq_error"), (f"{x:.1e}" for x in both)))


def measurements(report: Report) -> Iterator[Measurement]:
    for name in ("local", "random"):
        for T in LENGTHS:
            for kind in KINDS:
                for who in ("ours", "eager", "flex"):
                    # plain torch takes seconds, and a mask of 4 keys a block all memory
                    few = kind in ("msa", "qsa") and T == 8192
                    most = {"dsa": 32768, "dsa latents": 65536}.get(kind, T)
                    ours = who == "ours" and most >= T
                    if ours or few or (who, kind, T) == FLEX:
                        run = partial(rows, kind, name, T, who, report)
                        yield f"{kind} {name} {T} {who}", "selected_attention", run


def main(argv: list[str] | None = None) -> None:
    report = Report(parser(__doc__).parse_args(argv))
    report.measure(measurements(report))


if __name__ == "__main__":
    main()
