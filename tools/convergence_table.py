"""The table of convergence.csv: runs of ours and of fla's, each from several seeds."""

from collections.abc import Sequence
from itertools import combinations

from table_cells import Cell, Row, Table, label, number, place, read

Losses = dict[str, dict[int, Row]]  # "ours 0" or "fla 0" -> step -> its newest row
PARTS = {"train": "train", "held-out": "held out"}


def losses() -> dict[tuple[str, str], Losses]:
    """By model and part, of those with seeds."""
    found: dict[tuple[str, str], Losses] = {}
    for x in read("convergence"):
        if x.get("run")[-1].isdigit():
            runs = found.setdefault((x.get("model"), x.get("part")), {})
            runs.setdefault(x.get("run"), {})[int(x.get("step"))] = x
    return dict(sorted(found.items()))


def last_step(runs: Losses) -> int:
    """That all of them reached."""
    return max(set.intersection(*({*x} for x in runs.values())))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def convergence() -> Table:
    """Means over seeds, and mean distances: over seeds, and over pairs of fla's seeds."""
    rows: list[tuple[Cell, ...]] = []
    used: list[Row] = []
    for (model, part), runs in losses().items():
        step = last_step(runs)
        last = {run: x[step] for run, x in runs.items()}
        loss = {run: float(x.get("loss")) for run, x in last.items()}
        ours, fla = (
            {x.split()[1]: y for x, y in loss.items() if who in x} for who in ("ours", "fla")
        )
        apart = mean([abs(ours[x] - fla[x]) for x in ours])
        seeds = mean([abs(x - y) for x, y in combinations(fla.values(), 2)])
        sources = tuple(place(x, "loss") for x in last.values())
        figures = (mean([*ours.values()]), mean([*fla.values()]), apart, seeds)
        rows.append(
            (
                label(f"{model}, {PARTS[part]}"),
                number(last["fla 0"], "step", digits=4),
                label(str(len(fla))),
                *(Cell(f"{x:.4f}", sources) for x in figures),
            )
        )
        used += last.values()
    headings = (
        "model", "step", "seeds", "ours", "fla", "ours to fla, same seed", "between fla's seeds",
    )  # fmt: skip
    return Table("convergence", "bench/convergence.py", headings, tuple(rows), tuple(used))
