"""The table of convergence.csv: runs of ours and of fla's, each from several seeds."""

from collections.abc import Sequence
from itertools import combinations

from table_cells import Cell, Row, Table, label, number, pair, place, read

Losses = dict[str, dict[int, Row]]  # "ours 0" or "fla 0" -> step -> row
PARTS = {"train": "train", "held-out": "held out"}


# runs of before there were several seeds, and the peers and seeds that they had
EARLIER = {("kda", "fla"): "fla 0", ("kda", "other_seed"): "fla 1"}


def losses() -> dict[tuple[str, str], Losses]:
    """By model and part, of those with seeds; of several runs from a seed the one that got on the
    farthest, or the last of them."""
    found: dict[tuple[str, str], dict[str, list[dict[int, Row]]]] = {}
    for x in read("convergence"):
        model, run, step = x.get("model"), x.get("run"), int(x.get("step"))
        run = EARLIER.get((model, run), run)
        if run[-1].isdigit():
            tries = found.setdefault((model, x.get("part")), {}).setdefault(run, [{}])
            if step <= max(tries[-1], default=0):
                tries.append({})
            tries[-1][step] = x
    return {
        of: {run: max(reversed(tries), key=max) for run, tries in runs.items()}
        for of, runs in sorted(found.items())
    }


def complete(runs: Losses) -> dict[int, list[str]]:
    """Steps that ours and fla's of two seeds at least have reached, and these seeds."""
    seeds = sorted({x.split()[1] for x in runs})
    found = {}
    for step in sorted({y for x in runs.values() for y in x}):
        have = [x for x in seeds if step in runs[f"ours {x}"] and step in runs[f"fla {x}"]]
        if len(have) > 1:
            found[step] = have
    return found


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def gaps(runs: Losses, step: int, seeds: Sequence[str]) -> tuple[float, float]:
    """Mean distance of ours to fla from the same seed, and between fla's seeds."""
    ours, fla = ([value(runs[f"{who} {x}"][step]) for x in seeds] for who in ("ours", "fla"))
    between = [abs(x - y) for x, y in combinations(fla, 2)]
    return mean([abs(x - y) for x, y in zip(ours, fla, strict=True)]), mean(between)


def value(row: Row) -> float:
    return float(row.get("loss"))


def convergence() -> Table:
    """At the last step, and of distances the means over the steps of its second half."""
    rows: list[tuple[Cell, ...]] = []
    used: list[Row] = []
    for (model, part), runs in losses().items():
        steps = complete(runs)
        step, seeds = max(steps.items())
        half = [x for x in steps if 2 * x >= step]
        last = {who: [runs[f"{who} {x}"][step] for x in seeds] for who in ("ours", "fla")}
        over = zip(*(gaps(runs, x, steps[x]) for x in half))
        figures = [mean([*map(value, x)]) for x in last.values()]
        figures += [*gaps(runs, step, seeds), *(mean(x) for x in over)]
        shown = [runs[f"{who} {x}"][y] for y in half for who in ("ours", "fla") for x in steps[y]]
        at_end = tuple(place(x, "loss") for x in (*last["ours"], *last["fla"]))
        throughout = tuple(place(x, "loss") for x in shown)
        sources = [at_end] * 4 + [throughout] * 2
        cells = [Cell(f"{x:.4f}", y) for x, y in zip(figures, sources, strict=True)]
        rows.append(
            (
                label(f"{model}, {PARTS[part]}"),
                number(last["fla"][0], "step", digits=4),
                label(str(len(seeds))),
                *cells[:2],
                pair(*cells[2:4]),
                pair(*cells[4:]),
            )
        )
        used += shown
    headings = (
        "model", "step", "seeds", "ours", "fla", "apart at that step", "apart in the second half",
    )  # fmt: skip
    return Table("convergence", "bench/convergence.py", headings, tuple(rows), tuple(used))
