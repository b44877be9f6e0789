"""The table of convergence.csv: runs of ours, of fla's, and of fla's from weights that were moved
by a millionth, each from several seeds."""

from collections.abc import Sequence
from itertools import combinations

from table_cells import Cell, Row, Table, label, number, place, read, triple

Losses = dict[str, dict[int, Row]]  # "ours 0", "fla 0" or "moved 0" -> step -> row
PARTS = {"train": "train", "held-out": "held out", "all-held-out": "all of held out"}


def losses() -> dict[tuple[str, str], Losses]:
    """By model and part, of those with seeds, on the GPU that was last to have two of them; of
    several runs from a seed the one that got on the farthest, or the last of them."""
    found: dict[tuple[str, str], dict[str, dict[str, list[dict[int, Row]]]]] = {}
    for x in read("convergence"):
        run, step, gpu = x.get("run"), int(x.get("step")), x.get("device")
        if run[-1].isdigit():
            gpus = found.setdefault((x.get("model"), x.get("part")), {})
            runs = gpus[gpu] = gpus.pop(gpu, {})
            tries = runs.setdefault(run, [{}])
            if step <= max(tries[-1], default=0):
                tries.append({})
            tries[-1][step] = x
    chosen = {}
    for of, gpus in sorted(found.items()):
        for runs in gpus.values():
            farthest = {run: max(reversed(tries), key=max) for run, tries in runs.items()}
            if complete(farthest):
                chosen[of] = farthest
    return chosen


def complete(runs: Losses) -> dict[int, list[str]]:
    """Steps that ours and fla's of two seeds at least have reached, and these seeds."""
    seeds = sorted({x.split()[1] for x in runs})
    found = {}
    for step in sorted({y for x in runs.values() for y in x}):
        have = [x for x in seeds if all(step in runs.get(f"{y} {x}", {}) for y in ("ours", "fla"))]
        if len(have) > 1:
            found[step] = have
    return found


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def gaps(runs: Losses, step: int, seeds: Sequence[str]) -> tuple[float, float, float]:
    """Mean distance of ours to fla from the same seed, between fla's seeds, and of fla's moved runs
    to fla from the same seed, NaN if there are none."""
    ours, fla = ([value(runs[f"{who} {x}"][step]) for x in seeds] for who in ("ours", "fla"))
    between = [abs(x - y) for x, y in combinations(fla, 2)]
    moved = [
        abs(value(runs[f"moved {x}"][step]) - y)
        for x, y in zip(seeds, fla, strict=True)
        if step in runs.get(f"moved {x}", {})
    ]
    return mean([abs(x - y) for x, y in zip(ours, fla, strict=True)]), mean(between), mean(moved)


def value(row: Row) -> float:
    return float(row.get("loss"))


def of_steps(runs: Losses, steps: dict[int, list[str]]) -> list[Row]:
    names = ("ours", "fla", "moved")
    asked = [(f"{who} {x}", y) for y in steps for who in names for x in steps[y]]
    return [runs[name][y] for name, y in asked if y in runs.get(name, {})]


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
        shown = of_steps(runs, {x: steps[x] for x in half})
        at_end = tuple(place(x, "loss") for x in of_steps(runs, {step: seeds}))
        throughout = tuple(place(x, "loss") for x in shown)
        sources = [at_end] * 5 + [throughout] * 3
        texts = ["" if x != x else f"{x:.4f}" for x in figures]
        cells = [Cell(x, y) for x, y in zip(texts, sources, strict=True)]
        rows.append(
            (
                label(f"{model}, {PARTS[part]}"),
                number(last["fla"][0], "step", digits=4),
                label(str(len(seeds))),
                *cells[:2],
                triple(*cells[2:5]),
                triple(*cells[5:]),
            )
        )
        used += shown
    headings = (
        "model", "step", "seeds", "ours", "fla", "apart at that step", "apart in the second half",
    )  # fmt: skip
    return Table("convergence", "bench/convergence.py", headings, tuple(rows), tuple(used))
