"""The plots of docs/performance.md, out of bench/results: python tools/plots.py

docs/plots/time.svg, memory.svg: against the length, of lengths.csv (bench/lengths.py) and
delta_peers.csv; the newest row of each operator, provider and length counts.
docs/plots/peers.svg: of delta_peers.csv and linear_gpu_peers.csv, the shares of the peers' time.
docs/plots/first_calls.svg: of first_calls.csv.
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
COLOURS = {"slipstream": "C0", "fla": "C1", "cuDNN": "C2", "FlashQLA": "C3"}
COPY_BYTES_PER_MS = 4.28e9  # device copy on an H200
WANTED_SHARE = 0.9  # of FlashQLA's time


def read(name: str) -> list[Row]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def curves(rows: list[Row]) -> Curves:
    newest = {(row["operator"], row["who"], int(row["T"])): row for row in rows}
    found: Curves = defaultdict(lambda: defaultdict(list))
    for (operator, who, _), row in sorted(newest.items()):
        found[operator][who].append(row)
    return found


def beside_flash_qla(rows: list[Row]) -> list[Row]:
    """One sequence's rows of delta_peers.csv as those of lengths.csv, the heads in the name."""
    single = {"Q1": "8192 16/64", "Q2": "32768 2/8"}
    found: list[Row] = []
    for row in rows:
        T, _, heads = single.get(row["shape"], row["shape"]).partition(" ")
        if not T.isdigit() or "(" in heads or not row["both_ms_of_peer"]:
            continue
        H, HV = (int(x) for x in heads.split("/"))
        qkv = 256 * int(T) * (2 * H + HV) + 8 * int(T) * HV  # bytes: K = V = 128, float32 gates
        forward = qkv + 256 * int(T) * HV
        both = 2 * qkv + forward + 256 * int(T) * HV
        same = {"operator": f"gated_delta_rule {heads}", "T": T}
        for part, moved in (("fwd", forward), ("both", both)):
            same[f"floor_{part}_ms"] = str(moved / COPY_BYTES_PER_MS)
        for who, column in (("slipstream", "slipstream"), ("FlashQLA", "flash_qla")):
            times = {"fwd_ms": row[f"{column}_ms"], "both_ms": row[f"{column}_both_ms"]}
            found.append({**same, **times, "who": who})
    return found


def bars(axes: Axes, names: list[str], columns: dict[str, list[float]]) -> None:
    """Shares, the first name on top."""
    height = 0.8 / len(columns)
    for i, (label, values) in enumerate(columns.items()):
        places = [-y - (i - (len(columns) - 1) / 2) * height for y in range(len(names))]
        axes.barh(places, values, height=0.95 * height, label=label)
    axes.set_yticks([-y for y in range(len(names))], names)
    axes.legend(fontsize=7)


def beside(flash_qla: list[Row], fla: list[Row]) -> Path:
    """Forward, and with backward, of FlashQLA's time at each shape; of fla's, and of its memory."""
    newest = {row["shape"]: row for row in flash_qla if row["both_ms_of_peer"]}
    others = {f"{x['operator']} {x['shape']}": x for x in fla if is_number(x["fla both"])}
    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 0.34 * len(newest) + 1))
    parts = {"forward": "ms", "with backward": "both_ms"}
    shares = {x: [float(row[f"{y}_of_peer"]) for row in newest.values()] for x, y in parts.items()}
    bars(left, list(newest), shares)
    left.axvline(WANTED_SHARE, color="k", ls=":")
    left.set_xlabel("of FlashQLA's time")
    columns = {"forward": "fwd", "with backward": "both", "memory": "peak_GiB"}
    shares = {
        x: [float(row[y]) / float(row[f"fla {y}"]) for row in others.values()]
        for x, y in columns.items()
    }
    bars(right, list(others), shares)
    right.set_xlabel("of fla's time and memory")
    return save(figure, "peers")


def is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


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
    peers = read("delta_peers")
    found = curves(read("lengths"))
    every = curves([*read("lengths"), *beside_flash_qla(peers)])
    print(against_length(every, "time", "ms", time))
    print(against_length(found, "memory", "MiB", memory))
    print(beside(peers, read("linear_gpu_peers")))
    print(first_calls(read("first_calls")))


if __name__ == "__main__":
    main()
