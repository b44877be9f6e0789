"""The plots of docs/performance.md, out of bench/results: python tools/plots.py

docs/plots/summary.svg: how many times as fast as its peer each row of the table is.
docs/plots/flash_qla.svg, fla.svg: the rows of the tables, as shares of the peers' time.
docs/plots/time.svg, memory.svg: against the length, of lengths.csv; the newest row of each
operator, provider and length counts.
docs/plots/first_calls.svg: seconds of the first call, of first_calls.csv.
docs/plots/convergence.svg: the losses of convergence.csv.
"""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from table_specs import LOSSES, TABLES
from tables import Row, is_number, read

PLOTS = Path(__file__).parents[1] / "docs" / "plots"
COLUMNS = 3
WIDTH_INCHES = 9.0  # near that of a page's text, so that letters keep their size
# text stays text, and the same rows give the same file
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "slipstream", "font.size": 10})
RUNS = {"ours": "slipstream", "fla": "fla", "moved": "fla, weights off by a millionth"}
COLOURS = {"slipstream": "C0", "fla": "C1", "cuDNN": "C2", RUNS["moved"]: "0.7"}


def save(figure: Figure, name: str, top: float = 1.0) -> None:
    figure.tight_layout(rect=(0, 0, 1, top))
    figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)
    print(PLOTS / f"{name}.svg")


def ratio(row: Row, above: str, below: str) -> float:
    known = is_number(row[above]) and is_number(row[below])
    return float(row[above]) / float(row[below]) if known else math.nan


def shares(name: str, peer: str, rows: dict[str, Row], columns: dict[str, tuple]) -> None:
    """Bars, the first row on top; a line at 1, where both would take the same."""
    figure, axes = plt.subplots(figsize=(WIDTH_INCHES, 0.36 * len(rows) + 1.2))
    height = 0.8 / len(columns)
    for i, (label, pair) in enumerate(columns.items()):
        places = [-y - (i - (len(columns) - 1) / 2) * height for y in range(len(rows))]
        values = [ratio(x, *pair) for x in rows.values()]
        axes.barh(places, values, height=0.95 * height, label=label)
    axes.set_yticks([-y for y in range(len(rows))], [*rows])
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    axes.axvline(1, color="k", lw=1)
    axes.set_xlabel(f"Slipstream / {peer} (shorter is better)")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="upper center", ncols=len(columns))
    save(figure, name, top=0.95)


def beside_peers() -> None:
    rows = {x: line[""] for x, line in TABLES["linear"].found().items()}
    rows = {x: row for x, row in rows.items() if is_number(row["fla both"])}
    parts = (("time, forward", "fwd"), ("time, forward and backward", "both"))
    columns = {part: (x, f"fla {x}") for part, x in (*parts, ("memory", "peak_GiB"))}
    shares("fla", "fla", rows, columns)
    rows = {x: line[""] for x, line in TABLES["flash_qla"].found().items()}
    parts = (("forward", "ms"), ("forward and backward", "both_ms"))
    columns = {part: (f"slipstream_{x}", f"flash_qla_{x}") for part, x in parts}
    shares("flash_qla", "FlashQLA", rows, columns)


def summary() -> None:
    """Small enough for a telephone, where it is shown at three quarters of its size."""
    rows = [line[""] for line in TABLES["summary"].found().values()]
    figure, axes = plt.subplots(figsize=(5.0, 3.6))
    for i, label in enumerate(("forward", "with backward")):
        times = [
            [x[who].replace("\u00a0", "").split("/") for who in ("ours", "theirs")] for x in rows
        ]
        # a loss has one number, with its backward; TFLOP/s are of the backward alone
        given = [(y, float(x[0][-1]), float(x[1][-1])) if i else (y, float(x[0][0]), float(x[1][0]))
                 for y, x in enumerate(times) if i or len(x[0]) > 1]  # fmt: skip
        values = [a / b if rows[y]["unit"] == "TFLOP/s" else b / a for y, a, b in given]
        axes.barh([-y - (i - 0.5) * 0.4 for y, *_ in given], values, height=0.38, label=label)
    names = [f"{x['what'].partition(',')[0]}\nbeside {x['peer']}" for x in rows]
    axes.set_yticks([-y for y in range(len(rows))], names)
    axes.axvline(1, color="k", lw=1)
    axes.set_xlabel("times as fast (longer is better)")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="upper center", ncols=2)
    save(figure, "summary", top=0.93)


# column, provider or "" for all, label, style
TIME = (
    ("fwd_ms", "", "{}, forward", {"marker": "o", "ls": "--"}),
    ("both_ms", "", "{}, forward and backward", {"marker": "s"}),
    ("floor_fwd_ms", "slipstream", "floor, forward", {"color": "k", "ls": ":"}),
    ("floor_both_ms", "slipstream", "floor, forward and backward", {"color": "k", "ls": "-."}),
)
MEMORY = (
    ("peak_mib", "", "{}, beyond the inputs", {"marker": "o"}),
    ("results_mib", "slipstream", "outputs and gradients", {"color": "k", "ls": ":"}),
)


def against_length(name: str, unit: str, lines: tuple) -> None:
    found: dict[str, dict[str, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in read("SELECT * FROM lengths ORDER BY operator, who, T + 0, n"):
        found[row["operator"]][row["who"]][int(row["T"])] = row
    size = (WIDTH_INCHES, 2.8 * -(-len(found) // COLUMNS) + 0.8)
    figure, grid = plt.subplots(
        -(-len(found) // COLUMNS), COLUMNS, figsize=size, squeeze=False, sharex=True
    )
    shown: dict[str, Any] = {}
    for i, axes in enumerate(grid.flat):
        axes.set_visible(i < len(found))
    for i, ((operator, providers), axes) in enumerate(zip(found.items(), grid.flat)):
        for column, only, label, style in lines:
            for who, rows in providers.items():
                if only in ("", who):
                    values = [float(x[column]) for x in rows.values()]
                    axes.plot([*rows], values, label=label.format(who),
                              **{"color": COLOURS[who], **style})  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({x for rows in providers.values() for x in rows})
        axes.set_xticks(ticks, [f"{x // 1024}k" for x in ticks])
        axes.set_title(operator)
        axes.set_ylabel(unit if i % COLUMNS == 0 else "")
        axes.set_xlabel("tokens" if i >= len(found) - COLUMNS else "")
        axes.tick_params(labelbottom=i >= len(found) - COLUMNS)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        shown |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(shown.values(), shown.keys(), loc="upper center", ncols=2)
    save(figure, name, top=1 - 0.9 / size[1])


def first_calls() -> None:
    """Bars, the longest on top."""
    rows = read("""SELECT * FROM first_calls WHERE n IN (SELECT max(n) FROM first_calls
        WHERE warm_s <> '' AND note = '' GROUP BY operator) ORDER BY cold_s + 0""")
    names = [x["operator"] for x in rows]
    figure, axes = plt.subplots(figsize=(WIDTH_INCHES, 0.28 * len(names) + 1))
    axes.barh(names, [float(x["cold_s"]) for x in rows], label="empty cache")
    axes.barh(names, [float(x["warm_s"]) for x in rows], height=0.4, label="filled cache")
    axes.set_xlabel("seconds, forward and backward")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right")
    save(figure, "first_calls")


def convergence() -> None:
    """Training losses of all seeds, and below by how much each run is above the mean of fla's."""
    models: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in read(f"""{LOSSES} SELECT losses.*, last FROM losses JOIN
            (SELECT DISTINCT model, part, seed, last FROM both WHERE at = last)
            USING (model, part, seed) WHERE part = 'train' AND losses.at <= last
            ORDER BY model, who = 'ours', who = 'fla', seed, losses.at"""):
        models[row["model"]][row["run"]][int(row["at"])] = float(row["loss"])
    figure, grid = plt.subplots(
        2, len(models), figsize=(WIDTH_INCHES, 5.5), squeeze=False, sharex=True
    )
    for (model, runs), (above, below) in zip(models.items(), grid.T):
        steps = [*runs["fla 0"]]
        of = {x: [run[y] for y in steps] for x, run in runs.items() if steps[-1] in run}
        fla = [*zip(*(values for run, values in of.items() if run.startswith("fla")))]
        middle = [sum(x) / len(x) for x in fla]
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
    save(figure, "convergence", top=0.93)


if __name__ == "__main__":
    summary()
    beside_peers()
    against_length("time", "ms", TIME)
    against_length("memory", "MiB", MEMORY)
    first_calls()
    convergence()
