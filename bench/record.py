"""Rows of measurements, kept under version control: what a claim about speed has to point at."""

import csv
import datetime
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def record(name: str, rows: Sequence[Mapping[str, object]]) -> Path:
    """Appends rows, with date, device and versions, to results/NAME.csv; new columns go last."""
    path = RESULTS / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    common = {
        "date": datetime.date.today().isoformat(),
        "device": device_name(),
        "torch": torch.__version__,
    }
    full = [{**common, **row} for row in rows]
    names = list(dict.fromkeys(name for row in full for name in row))
    old: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            known = list(reader.fieldnames or ())
            old = list(reader)
        names = [*known, *(name for name in names if name not in known)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=names, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*old, *full])
    return path


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as aligned columns."""
    names = list(rows[0])
    cells = [names, *[[str(row[n]) for n in names] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells
    )
