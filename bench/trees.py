"""Prefix trees beside the same samples as rows, and beside a packed row of the same tokens.

    python bench/trees.py                       every case
    python bench/trees.py --only hybrid         training steps of a hybrid of 0.35 B parameters
    python bench/trees.py --only chunk_kda      an operator, forward and backward

group: 16 completions of 1024 tokens on a prompt of 16384. deep: 200 nodes, 6 deep, of 32768 tokens.
ours_ms: of the tree. rows_ms: of the samples as rows, one after the other, in steps with gradients
added up and one step of the optimizer. peer: the same tokens as one row, or packed without
parents. Steps are medians of the clock, operators of the device, providers in turns.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from harness import (
    DEVICE,
    Call,
    Provider,
    Report,
    Row,
    first,
    language_model,
    parser,
    peak_bytes,
)

from slipstream.runtime.prefix_tree import PrefixTree
from slipstream.tools.catalog import OPERATORS, Sample, Shape

MODELS = ("hybrid group", "hybrid deep")
# all that take trees, in chunks
OPERATOR_NAMES = tuple(
    dict.fromkeys(
        x.op for x in OPERATORS if "parents" in x.takes and not x.op.startswith("fused_recurrent")
    )
)
# layers of the hybrid: three of four are linear
MIXERS = ["gated_deltanet", "gated_deltanet", "gated_deltanet", "attention"] * 6


def tree_of(name: str, small: bool) -> PrefixTree:
    if name.endswith("group"):
        prompt, completion = (128, 16) if small else (16384, 1024)
        lengths, parents = [prompt] + [completion] * 16, [-1] + [0] * 16
    else:
        count, total = (20, 400) if small else (200, 32768)
        generator = torch.Generator().manual_seed(0)
        parents, depth = [-1], [1]
        while len(parents) < count:
            parent = int(torch.randint(len(parents), (1,), generator=generator))
            # the first six are a chain, so that the tree is as deep as it may be
            parent = len(parents) - 1 if len(parents) < 6 else parent
            if depth[parent] < 6:
                parents.append(parent)
                depth.append(depth[parent] + 1)
        # level by level, as tree_of_rows has them
        order = sorted(range(count), key=depth.__getitem__)
        place = {n: i for i, n in enumerate(order)}
        parents = [-1 if parents[n] < 0 else place[parents[n]] for n in order]
        cuts = torch.randint(total, (count - 1,), generator=generator).sort().values.tolist()
        lengths = [y - x for x, y in zip([0, *cuts], [*cuts, total])]
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return PrefixTree(torch.tensor(offsets, dtype=torch.int32, device=DEVICE), parents)


def rows_of(tree: PrefixTree) -> list[list[int]]:
    """The tokens of each sample."""
    inner = set(tree.parents)
    leaves = [n for n in range(len(tree.parents)) if n not in inner]
    return [[t for x in [*tree.path(n), tree.own(n)] for t in x] for n in leaves]


def hybrid(name: str, report: Report) -> Iterable[Row]:
    small = report.options.small
    tree = tree_of(name, small)
    model = language_model(MIXERS[:4] if small else MIXERS, small, hidden_size=1024, num_heads=8)
    model.train()
    parameters = sum(x.numel() for x in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE.type == "cuda")
    ids = torch.randint(1, 64 if small else 32000, (1, tree.tokens), device=DEVICE)
    rows = rows_of(tree)
    labels = ids.clone()
    for n in set(tree.parents) - {-1}:  # what several samples share has no loss
        labels[:, slice(*tree.offsets[n : n + 2])] = -100
    samples = [(ids[:, row], labels[:, row]) for row in rows]

    def step(calls: list[dict[str, Any]]) -> None:
        for given in calls:
            model(use_cache=False, num_items_in_batch=1000, **given).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    calls: dict[str, Call] = {
        "ours": partial(step, [{"input_ids": ids, "labels": labels, "context": tree}]),
        "one row": partial(step, [{"input_ids": ids, "labels": labels}]),
    }
    if name.endswith("deep"):
        packed = {"input_ids": ids, "labels": labels, "cu_seqlens": tree.cu_seqlens}
        calls["packed"] = partial(step, [packed])
    if name.endswith("group"):
        given = [{"input_ids": x, "labels": y} for x, y in samples]
        calls["rows"] = partial(step, given)
    times = {}
    for who, call in calls.items():
        call()
        peak = peak_bytes(call) / 2**30
        times[who] = 1e3 * statistics.median(first(call) for _ in range(report.runs(3)))
        print(f"{name} {who}: {times[who]:.1f} ms, {peak:.2f} GiB", flush=True)
    yield {
        "case": f"{name}, {parameters / 1e9:.2f} B",
        **sizes(tree),
        "ours_ms": round(times["ours"], 2),
        "rows_ms": round(times["rows"], 2) if "rows" in times else "",
        "peer": "one row",
        "peer_ms": round(times["one row"], 2),
    }


def sizes(tree: PrefixTree) -> dict[str, int]:
    return {"unique tokens": tree.tokens, "row tokens": sum(map(len, rows_of(tree)))}


def operator(name: str, kind: str, report: Report) -> Iterable[Row]:
    """Forward and backward."""
    tree = tree_of(kind, report.options.small)
    lengths = tuple(y - x for x, y in zip(tree.offsets, tree.offsets[1:]))
    sample = next(x for x in OPERATORS if x.op == name and not x.variant)
    shape = report.shape(Shape(B=1, H=8, K=128, V=128, D=2048, lengths=lengths))
    tree = tree if shape.lengths == lengths else tree_with(shape.lengths or (), tree)
    args = sample.inputs(shape, DEVICE)
    cu, fn = args.pop("cu_seqlens"), partial(sample.fn, **sample.options)
    alone = [Provider(fn, row_of(sample, args, row)) for row in rows_of(tree)]
    calls: dict[str, Call] = {
        "ours": Provider(partial(fn, context=tree), args).gradients,
        "packed, no parents": Provider(partial(fn, cu_seqlens=cu), args).gradients,
        "one row": Provider(fn, args).gradients,
        "rows": lambda: [x.gradients() for x in alone],
    }
    times = {who: round(x, 3) for who, x in report.times(calls, 10).items()}
    for peer in list(calls)[1:3]:
        yield {
            "case": f"{name} {kind}",
            **sizes(tree),
            "ours_ms": times.get("ours", 0),
            "rows_ms": times.get("rows", 0),
            "peer": peer,
            "peer_ms": times.get(peer, 0),
        }


def row_of(sample: Sample, args: Mapping[str, Any], row: Sequence[int]) -> dict[str, Any]:
    """The arguments of one sample alone."""
    index, found = torch.tensor(row, device=DEVICE), dict(args)
    for name, letters in sample.dims.items():
        if letters[1:2] == "T":
            found[name] = args[name][:, index]
        elif letters[1:2] == "R":  # two steps a token
            found[name] = args[name][:, torch.stack([2 * index, 2 * index + 1], 1).flatten()]
    return found


def tree_with(lengths: Sequence[int], like: PrefixTree) -> PrefixTree:
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return PrefixTree(torch.tensor(offsets, dtype=torch.int32, device=DEVICE), like.parents)


def main(argv: Sequence[str] | None = None) -> None:
    report = Report(parser(__doc__).parse_args(argv))
    cases = [(name, "trees", partial(hybrid, name, report)) for name in MODELS]
    cases += [
        (f"{name} {kind}", "trees", partial(operator, name, kind, report))
        for kind in ("group", "deep")
        for name in OPERATOR_NAMES
    ]
    report.measure(cases)


if __name__ == "__main__":
    main()
