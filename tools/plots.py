"""The plots of docs/performance.md, out of bench/results: python tools/plots.py

docs/plots/flash_qla.svg, fla.svg: the rows of the tables, as shares of the peers' time.
docs/plots/time.svg, memory.svg: against the length, of lengths.csv; the newest row of each
operator, provider and length counts.
docs/plots/first_calls.svg: the rows of its table.
docs/plots/convergence.svg: the losses of convergence.csv.
docs/plots/scaling.svg: of context_parallel.csv, as many tokens on each GPU.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from convergence_table import complete, losses, mean
from linear_tables import LINEAR, flash_qla_rows, linear_row, peak
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from performance_tables import first_calls
from scaling_tables import forecast, measured, one_and_two, settings, share, takes_all
from table_cells import Row, is_number, read

PLOTS = Path(__file__).parents[1] / "docs" / "plots"
COLUMNS = 3
WIDTH_INCHES = 9.0  # near that of a page's text, so that letters keep their size
# text stays text, and the same rows give the same file
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "slipstream", "font.size": 10})

Curves = dict[str, dict[str, list[Row]]]  # operator -> provider -> rows by length
Panel = Callable[[Axes, dict[str, list[Row]]], None]
RUNS = {"ours": "slipstream", "fla": "fla", "moved": "fla, weights off by a millionth"}
COLOURS = {"slipstream": "C0", "fla": "C1", "cuDNN": "C2", RUNS["moved"]: "0.7"}


def value(row: Row, column: str) -> float:
    return float(row.get(column))


def curves() -> Curves:
    rows = read("lengths")
    newest = {(x.get("operator"), x.get("who"), int(x.get("T"))): x for x in rows}
    found: Curves = defaultdict(lambda: defaultdict(list))
    for (operator, who, _), row in sorted(newest.items(), key=lambda x: x[0]):
        found[operator][who].append(row)
    return found


def shares(name: str, peer: str, names: list[str], columns: dict[str, list[float]]) -> Path:
    """Bars, the first name on top; a line at 1, where both would take the same."""
    figure, axes = plt.subplots(figsize=(WIDTH_INCHES, 0.36 * len(names) + 1.2))
    height = 0.8 / len(columns)
    for i, (label, values) in enumerate(columns.items()):
        places = [-y - (i - (len(columns) - 1) / 2) * height for y in range(len(names))]
        axes.barh(places, values, height=0.95 * height, label=label)
    axes.set_yticks([-y for y in range(len(names))], names)
    axes.set_ylim(-len(names) + 0.4, 0.6)
    axes.axvline(1, color="k", lw=1)
    axes.set_xlabel(f"Slipstream / {peer} (shorter is better)")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="upper center", ncols=len(columns))
    return save(figure, name, top=0.95)


def beside_flash_qla() -> Path:
    rows = flash_qla_rows()
    columns = {
        part: [value(x, f"slipstream_{y}") / value(x, f"flash_qla_{y}") for x in rows]
        for part, y in (("forward", "ms"), ("forward and backward", "both_ms"))
    }
    return shares("flash_qla", "FlashQLA", [x.get("shape") for x in rows], columns)


def beside_fla() -> Path:
    rows = {f"{x} {y}": linear_row(x, y) for x, y in LINEAR}
    rows = {x: y for x, y in rows.items() if is_number(y.get("fla both"))}
    columns = {
        part: [value(x, y) / value(x, f"fla {y}") for x in rows.values()]
        for part, y in (("time, forward", "fwd"), ("time, forward and backward", "both"))
    }
    columns["memory"] = [
        value(x, "peak_GiB") / value(x, "fla peak_GiB") if peak(x, "peak_GiB").text else math.nan
        for x in rows.values()
    ]
    return shares("fla", "fla", list(rows), columns)


def line(axes: Axes, rows: list[Row], column: str, label: str, **style: Any) -> None:
    lengths = [int(x.get("T")) for x in rows]
    axes.plot(lengths, [value(x, column) for x in rows], label=label, **style)


def time(axes: Axes, providers: dict[str, list[Row]]) -> None:
    for who, rows in providers.items():
        colour = COLOURS[who]
        line(axes, rows, "fwd_ms", f"{who}, forward", color=colour, marker="o", ls="--")
        line(axes, rows, "both_ms", f"{who}, forward and backward", color=colour, marker="s")
    rows = providers["slipstream"]
    line(axes, rows, "floor_fwd_ms", "floor, forward", color="k", ls=":")
    line(axes, rows, "floor_both_ms", "floor, forward and backward", color="k", ls="-.")


def memory(axes: Axes, providers: dict[str, list[Row]]) -> None:
    for who, rows in providers.items():
        line(axes, rows, "peak_mib", f"{who}, beyond the inputs", color=COLOURS[who], marker="o")
    line(axes, providers["slipstream"], "results_mib", "outputs and gradients", color="k", ls=":")


def save(figure: Figure, name: str, top: float = 1.0) -> Path:
    figure.tight_layout(rect=(0, 0, 1, top))
    PLOTS.mkdir(exist_ok=True)
    path = PLOTS / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def against_length(found: Curves, name: str, unit: str, panel: Panel) -> Path:
    lines = -(-len(found) // COLUMNS)
    size = (WIDTH_INCHES, 2.8 * lines + 0.8)
    figure, grid = plt.subplots(lines, COLUMNS, figsize=size, squeeze=False, sharex=True)
    for axes in list(grid.flat)[len(found) :]:
        axes.set_visible(False)
    for i, ((operator, providers), axes) in enumerate(zip(found.items(), grid.flat)):
        panel(axes, providers)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({int(x.get("T")) for rows in providers.values() for x in rows})
        axes.set_xticks(ticks, [f"{x // 1024}k" for x in ticks])
        axes.set_title(operator)
        axes.set_ylabel(unit if i % COLUMNS == 0 else "")
        if i >= len(found) - COLUMNS:
            axes.set_xlabel("tokens")
            axes.tick_params(labelbottom=True)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    shown: dict[str, Any] = {}
    for axes in grid.flat:
        shown |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(shown.values(), shown.keys(), loc="upper center", ncols=2)
    return save(figure, name, top=1 - 0.9 / size[1])


def plot_first_calls() -> Path:
    """Bars, the longest on top."""
    rows = sorted(first_calls().used, key=lambda x: value(x, "cold_s"))
    names = [x.get("operator") for x in rows]
    figure, axes = plt.subplots(figsize=(WIDTH_INCHES, 0.28 * len(names) + 1))
    axes.barh(names, [value(x, "cold_s") for x in rows], label="empty cache")
    axes.barh(names, [value(x, "warm_s") for x in rows], height=0.4, label="filled cache")
    axes.set_xlabel("seconds, forward and backward")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right")
    return save(figure, "first_calls")


def plot_convergence() -> Path:
    """Training losses of all seeds, and below by how much each run is above the mean of fla's."""
    models = {model: runs for (model, part), runs in losses().items() if part == "train"}
    figure, grid = plt.subplots(
        2, len(models), figsize=(WIDTH_INCHES, 5.5), squeeze=False, sharex=True
    )
    for (model, runs), (above, below) in zip(models.items(), grid.T):
        last, seeds = max(complete(runs).items())
        names = [f"{who} {x}" for who in ("moved", "fla", "ours") for x in seeds]
        steps = [x for x in sorted(runs["fla 0"]) if x <= last]
        reached = [x for x in names if last in runs.get(x, {})]
        of = {run: [value(runs[run][x], "loss") for x in steps] for run in reached}
        middle = [mean(x) for x in zip(*(of[run] for run in of if run.startswith("fla")))]
        for run, values in of.items():
            name = RUNS[run.split()[0]]
            look = {"color": COLOURS[name], "lw": 1, "label": name if run.endswith("0") else None}
            above.plot(steps, values, **look)
            below.plot(steps, [x - y for x, y in zip(values, middle)], **look)
        above.set_title(model)
        below.set_xlabel("step")
        for axes, text in ((above, "loss, nats a byte"), (below, "above the mean of fla's")):
            axes.set_ylabel(text if axes in grid[:, 0] else "")
            axes.grid(alpha=0.3)
        below.set_ylim(-0.04, 0.04)
    figure.legend(*grid[0, -1].get_legend_handles_labels(), loc="upper center", ncols=3)
    return save(figure, "convergence", top=0.93)


def plot_scaling() -> Path:
    """The share of one GPU's speed that each of several has, points, and by the model, lines; and
    the memory of one GPU of two as a share of that of one with all tokens."""
    figure, (speed, memory) = plt.subplots(1, 2, figsize=(WIDTH_INCHES, 4.2))
    names, shares = [], defaultdict(list)
    for operator, heads, gate, tokens in settings():
        if (heads, gate, tokens) not in (("16", "weak", "65536"), ("32", "weak", "65536")):
            continue
        name = operator.removeprefix("chunk_").removesuffix("-narrow")
        one, two = one_and_two(operator, heads, gate, int(tokens), False)
        if one.get("both_GiB") and two.get("both_GiB"):
            names.append(name)
            for part in ("fwd", "both"):
                shares[part].append(value(two, f"{part}_GiB") / value(one, f"{part}_GiB"))
        one, two = one_and_two(operator, heads, gate, int(tokens), not takes_all(operator))
        pairs = {2: (one, two)}
        if (four := measured(operator, heads, gate, tokens, "4")) is not None:
            pairs[4] = four
        points = {1: 1.0} | {n: share(*pair, "both") for n, pair in pairs.items()}
        (drawn,) = speed.plot([*points], [*points.values()], "o", label=name)
        model = [forecast(one, two, "both", n) for n in (2, 4, 8)]
        speed.plot([1, 2, 4, 8], [1.0, *model], "--", color=drawn.get_color(), lw=1)
    speed.set_xscale("log", base=2)
    speed.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    speed.set_ylim(0.75, 1.05)
    speed.set_xlabel("GPUs, 65,536 tokens on each")
    speed.set_ylabel("share of one GPU's speed, with backward")
    speed.legend(loc="lower left")
    for i, (part, label) in enumerate((("fwd", "forward"), ("both", "with backward"))):
        places = [x + 0.4 * (i - 0.5) for x in range(len(names))]
        memory.bar(places, shares[part], width=0.4, label=label)
    memory.axhline(0.5, color="k", lw=1)
    memory.set_xticks(range(len(names)), names, rotation=30, ha="right")
    memory.set_ylabel("memory of a GPU of two / of one")
    memory.legend(loc="lower right")
    for axes in (speed, memory):
        axes.grid(alpha=0.3)
    return save(figure, "scaling")


def main() -> None:
    found = curves()
    print(against_length(found, "time", "ms", time))
    print(against_length(found, "memory", "MiB", memory))
    print(beside_flash_qla())
    print(beside_fla())
    print(plot_first_calls())
    print(plot_convergence())
    print(plot_scaling())


if __name__ == "__main__":
    main()
