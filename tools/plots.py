"""The plots of docs/performance.md, out of bench/results: python tools/plots.py

docs/plots/time.svg, memory.svg: against the length, of lengths.csv (bench/lengths.py); the newest
row of each operator, provider and length counts. docs/plots/first_calls.svg: of first_calls.csv.
"""

import csv
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS, PLOTS = ROOT / "bench" / "results", ROOT / "docs" / "plots"
WANTED_S = 10.0  # of a first call with an empty cache
COLUMNS = 4
# text stays text, and the same rows give the same file
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "slipstream", "font.size": 9})

Row = dict[str, str]
Curves = dict[str, dict[str, list[Row]]]  # operator -> provider -> rows by length
Panel = Callable[[Axes, dict[str, list[Row]]], None]
COLOURS = {"slipstream": "C0", "fla": "C1", "cuDNN": "C2"}


def read(name: str) -> list[Row]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def curves(rows: list[Row]) -> Curves:
    newest = {(row["operator"], row["who"], int(row["T"])): row for row in rows}
    found: Curves = defaultdict(lambda: defaultdict(list))
    for (operator, who, _), row in sorted(newest.items()):
        found[operator][who].append(row)
    return found


def line(axes: Axes, rows: list[Row], column: str, label: str, **style: Any) -> None:
    lengths = [int(row["T"]) for row in rows]
    axes.plot(lengths, [float(row[column]) for row in rows], label=label, **style)


def time(axes: Axes, providers: dict[str, list[Row]]) -> None:
    for who, rows in providers.items():
        colour = COLOURS[who]
        line(axes, rows, "fwd_ms", f"{who}, forward", color=colour, marker="o", ls="--")
        line(axes, rows, "both_ms", f"{who}, with backward", color=colour, marker="s")
    rows = providers["slipstream"]
    line(axes, rows, "floor_fwd_ms", "floor, forward", color="k", ls=":")
    line(axes, rows, "floor_both_ms", "floor, with backward", color="k", ls="-.")


def memory(axes: Axes, providers: dict[str, list[Row]]) -> None:
    for who, rows in providers.items():
        line(axes, rows, "peak_mib", f"{who}, beyond the inputs", color=COLOURS[who], marker="o")
    line(axes, providers["slipstream"], "results_mib", "outputs, gradients", color="k", ls=":")


def save(figure: Figure, name: str) -> Path:
    figure.tight_layout()
    PLOTS.mkdir(exist_ok=True)
    path = PLOTS / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def against_length(found: Curves, name: str, unit: str, panel: Panel) -> Path:
    lines = -(-len(found) // COLUMNS)
    figure, grid = plt.subplots(lines, COLUMNS, figsize=(14, 3.4 * lines), squeeze=False)
    for axes in list(grid.flat)[len(found) :]:
        axes.set_visible(False)
    for (operator, providers), axes in zip(found.items(), grid.flat):
        panel(axes, providers)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(title=operator, xlabel="tokens", ylabel=unit)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=6)
    return save(figure, name)


def first_calls(rows: list[Row]) -> Path:
    """Bars, the longest on top."""
    newest = {row["operator"]: row for row in rows if row["cold_s"]}
    names = sorted(newest, key=lambda x: float(newest[x]["cold_s"]))
    figure, axes = plt.subplots(figsize=(8, 0.24 * len(names) + 1))
    axes.barh(names, [float(newest[x]["cold_s"]) for x in names], label="empty cache")
    warm = [float(newest[x].get("warm_s") or 0) for x in names]
    axes.barh(names, warm, height=0.4, label="warm cache")
    axes.axvline(WANTED_S, color="k", ls=":", label="wanted at most, empty cache")
    axes.set_xlabel("seconds, forward and backward")
    axes.legend(fontsize=7, loc="lower right")
    return save(figure, "first_calls")


def main() -> None:
    found = curves(read("lengths"))
    print(against_length(found, "time", "ms", time))
    print(against_length(found, "memory", "MiB", memory))
    print(first_calls(read("first_calls")))


if __name__ == "__main__":
    main()
