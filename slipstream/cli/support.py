"""Runs of the matrix on the terminal, and docs/SUPPORT.md, which says what they found.

Runs of different releases add up in docs/support.json; SUPPORT.md is written from it.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from slipstream.cli.plans import find
from slipstream.cli.samples import Sample, Shape
from slipstream.core import machine, matrix
from slipstream.core.arch import ARCHS
from slipstream.core.faults import applying
from slipstream.core.releases import install

ROOT = Path(__file__).parents[2]
DATA, PAGE = ROOT / "docs/support.json", ROOT / "docs/SUPPORT.md"
VERIFIED = ROOT / "slipstream/core/verified.json"
_COLOURS = {"ok": "green", "slow": "yellow", "refused": "blue", "hang": "red", "crash": "red"}


class Run:
    """The kernels of some operators, found once, then compiled under each release."""

    def __init__(
        self, samples: Sequence[Sample], shapes: Sequence[Shape], archs: list[str], backward: bool
    ) -> None:
        self.console = Console(stderr=True)
        self.archs = archs
        self.without: dict[str, str] = {}
        self.tasks: list[matrix.Task] = []
        self.failures: list[str] = []
        with self._progress() as progress:
            bar = progress.add_task("finding kernels", total=len(archs))
            for arch in archs:
                found = find(samples, shapes, arch, backward)
                self.tasks += found.tasks
                self.without |= found.without
                self.failures += found.failures
                progress.advance(bar)
        for failure in self.failures:
            self.console.print(f"[red]failed[/] {escape(failure)}")

    def compile(self, release: str | None, processes: int, timeout: float) -> list[matrix.Row]:
        """Rows under one Triton release, None for the one that is here; prints its table."""
        path = [] if release is None else [str(install(release, machine.cache_dir() / "releases"))]
        failed: list[matrix.Row] = []
        with self._progress() as progress:
            bar = progress.add_task(f"triton {release or 'here'}", total=len(self.tasks))

            def done(row: matrix.Row) -> None:
                progress.advance(bar)
                if row.status in ("crash", "hang"):
                    failed.append(row)

            rows = matrix.run(
                self.tasks, processes=processes, timeout=timeout, path=path, done=done
            )
        Console().print(self._table(rows))
        for row in failed:
            self.console.print(
                f"[red]{row.status}[/] {row.arch} {row.kernel}: {escape(row.reason)}"
            )
        return rows

    def _progress(self) -> Progress:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(TextColumn("{task.description}"), *columns, console=self.console)

    def _table(self, rows: Sequence[matrix.Row]) -> Table:
        release = rows[0].triton if rows else "none"
        table = Table(title=f"Triton {release}: {dict(Counter(x.status for x in rows))}")
        for name in ("operator", *self.archs):
            table.add_column(name)
        for operator, cells in matrix.by_operator(rows).items():
            marks = [cells.get(x, ("-", ""))[0] for x in self.archs]
            coloured = [f"[{_COLOURS.get(x, 'dim')}]{x}[/]" for x in marks]
            table.add_row(operator, *coloured)
        return table


def line(row: matrix.Row) -> str:
    """A kernel in one line."""
    used = {k: v for k, v in (row.instructions or {}).items() if v}
    constants = " ".join(f"{k}={v}" for k, v in row.constants.items() if v != "False")
    sizes = f"shared {row.shared} registers {row.registers} stack {row.stack} {used}"
    about = f"{row.arch} {row.kernel} warps={row.warps} stages={row.stages} {constants}"
    return f"{row.status:8}{about}: {sizes} {row.seconds:.1f} s {row.reason}"


def record(rows: Sequence[matrix.Row], without: dict[str, str]) -> None:
    """Adds the rows to docs/support.json and writes what is made from it."""
    data = json.loads(DATA.read_text()) if DATA.exists() else {"releases": {}, "without": {}}
    data["without"] = without
    for release in dict.fromkeys(x.triton for x in rows):
        of_release = [x for x in rows if x.triton == release]
        known = data["releases"].setdefault(release, {"ptxas": {}, "operators": {}})
        known["ptxas"] |= {x.arch: x.ptxas for x in of_release}
        for operator, cells in matrix.by_operator(of_release).items():
            known["operators"].setdefault(operator, {}).update(cells)
    DATA.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(data))
    tried = {(x.arch, x.triton, x.ptxas) for x in rows}
    kept = [x for x in json.loads(VERIFIED.read_text()) if tuple(x.values()) not in tried]
    found = [dict(zip(("arch", "triton", "ptxas"), x)) for x in matrix.verified(rows)]
    ordered = sorted(kept + found, key=lambda x: tuple(x.values()))
    lines = ",\n".join(json.dumps(x) for x in ordered)
    VERIFIED.write_text(f"[\n{lines}\n]\n")
    machine.verified.cache_clear()


def page(data: dict) -> str:
    """docs/SUPPORT.md."""
    notes: list[str] = []

    def cell(release: str, ptxas: str, arch: str, found: list | None) -> str:
        if found is None:
            return "torch"
        status, reason = found
        avoided = [x for x in applying(arch, release, ptxas or None) if x.avoided]
        if status == "ok" and any(x.effect != "slow" for x in avoided):
            reason = f"with workarounds for {', '.join(x.name for x in avoided)}"
        if not reason:
            return status
        reason = _general(reason)
        if reason not in notes:
            notes.append(reason)
        return f"{status} [{notes.index(reason) + 1}]"

    lines = [_HEAD]
    for release in sorted(data["releases"], reverse=True):
        known = data["releases"][release]
        archs = [x for x in ARCHS if any(x in y for y in known["operators"].values())]
        lines += [f"\n## Triton {release}\n", f"| operator | {' | '.join(archs)} |"]
        lines.append("|---" * (len(archs) + 1) + "|")
        for operator, cells in known["operators"].items():
            ptxas = known["ptxas"]
            row = [cell(release, ptxas.get(x, ""), x, cells.get(x)) for x in archs]
            lines.append(f"| {operator} | {' | '.join(row)} |")
        names = [f"{x} {known['ptxas'][x]}" for x in archs if known["ptxas"].get(x)]
        lines.append(f"\nptxas: {', '.join(names)}.")
    lines.append("\n## Notes\n")
    lines += [f"{i}. {x}" for i, x in enumerate(notes, 1)]
    lines.append("\n## In plain torch everywhere\n")
    lines += [f"- {name}: {reason}" for name, reason in sorted(data["without"].items())]
    return "\n".join(lines) + "\n"


def _general(reason: str) -> str:
    """A reason without the figures of one kernel, so that notes stay few."""
    return "; ".join("spills" if x.startswith("spills") else x for x in reason.split("; "))


_HEAD = """# What runs where

Written by `slipstream matrix --record` (docs/matrix.md): every kernel of every operator, forward
and backward, for sample shapes, compiled ahead of time without a GPU. An operator has the worst of
its kernels.

- ok: compiles, fits into shared memory, hardly spills, uses the tensor cores.
- slow: compiles and fits, and runs slower than it could, for the reason noted.
- refused: the compiler refuses it or it does not fit; the operator runs in plain torch there.
- crash, hang: the compiler dies or does not finish.
- torch: no kernel, plain torch."""
