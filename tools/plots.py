"""The plots of docs/performance.md from the rows of bench/results: python tools/plots.py

lengths.csv (bench/lengths.py) gives time and memory against the length; the newest row of each
operator, provider and length counts.
"""

import csv
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
Row = dict[str, str]
Curves = dict[str, dict[str, list[Row]]]  # operator -> provider -> rows by length
Panel = Callable[[Axes, dict[str, list[Row]]], None]


def read(path: Path) -> Curves:
    newest: dict[tuple[str, str, int], Row] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            newest[row["operator"], row["who"], int(row["T"])] = row
    curves: Curves = defaultdict(lambda: defaultdict(list))
    for (operator, who, _), row in sorted(newest.items()):
        curves[operator][who].append(row)
    return curves


def line(axes: Axes, rows: list[Row], column: str, label: str, style: str) -> None:
    lengths = [int(row["T"]) for row in rows]
    axes.loglog(lengths, [float(row[column]) for row in rows], style, label=label, base=2)


def time(axes: Axes, providers: dict[str, list[Row]]) -> None:
    for who, rows in providers.items():
        line(axes, rows, "fwd_ms", f"{who}, forward", "o-")
        line(axes, rows, "both_ms", f"{who}, with backward", "s-")
    rows = providers["slipstream"]
    line(axes, rows, "floor_fwd_ms", "floor, forward", "k:")
    line(axes, rows, "floor_both_ms", "floor, with backward", "k--")


def memory(axes: Axes, providers: dict[str, list[Row]]) -> None:
    for who, rows in providers.items():
        line(axes, rows, "peak_mib", f"{who}, beyond the inputs", "o-")
    line(axes, providers["slipstream"], "results_mib", "outputs and gradients", "k:")


def draw(curves: Curves, name: str, unit: str, panel: Panel) -> Path:
    figure, grid = plt.subplots(2, -(-len(curves) // 2), figsize=(16, 8), sharex=True)
    for axes in list(grid.flat)[len(curves) :]:
        axes.set_visible(False)
    for (operator, providers), axes in zip(curves.items(), grid.flat):
        panel(axes, providers)
        axes.set(title=operator, xlabel="tokens", ylabel=unit)
        axes.grid(alpha=0.3)
    grid.flat[0].legend(fontsize=8)
    figure.tight_layout()
    path = ROOT / "docs" / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    return path


def main() -> None:
    curves = read(ROOT / "bench" / "results" / "lengths.csv")
    print(draw(curves, "performance_time", "ms", time))
    print(draw(curves, "performance_memory", "MiB", memory))


if __name__ == "__main__":
    main()
