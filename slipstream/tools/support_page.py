"""Runs of the matrix on the terminal, and docs/SUPPORT.md, which says what they found.

Runs of different releases add up in docs/support.json; SUPPORT.md is written from it.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slipstream.compiler import compiler_state, source_digest, support_matrix
from slipstream.compiler.aot import Job
from slipstream.compiler.arch import ARCHS
from slipstream.compiler.compile_worker import Worker
from slipstream.compiler.known_bugs import applying, version
from slipstream.compiler.triton_releases import install
from slipstream.runtime.files import write_text
from slipstream.tools import support_data
from slipstream.tools.backend_query import KernelsFound, find_everywhere
from slipstream.tools.catalog import OPERATORS, REPRESENTATIVE, Sample, Shape
from slipstream.tools.matrix_cache import RowCache
from slipstream.tools.terminal import bar, counts, legend
from slipstream.tools.variant_cover import cover, resolved

ROOT = Path(__file__).parents[2]
DATA, PAGE = ROOT / "docs/support.json", ROOT / "docs/SUPPORT.md"
VERIFIED = ROOT / "slipstream/compiler/verified.json"
# of the table, where nobody looks at it on a terminal
_WIDTH = 130
_COLOURS = {"ok": "green", "slow": "yellow", "refused": "blue", "hang": "red", "crash": "red"}


class MatrixRun:
    """The kernels of some operators, for some architectures, under one release after another.

    without: of the last one, (release, arch) -> operator -> why it compiles nothing.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        shapes: Sequence[Shape],
        archs: list[str],
        backward: bool,
        variants: str,
    ) -> None:
        self.console = Console(stderr=True)
        self.samples, self.shapes, self.archs = samples, shapes, archs
        self.backward = backward
        self.variants = {x: resolved(variants, x) for x in archs}
        self.without: dict[tuple[str, str], dict[str, str]] = {}
        self.failures: list[str] = []

    def compile(
        self, release: str | None, processes: int, timeout: float, recompile: bool = False
    ) -> list[support_matrix.Row]:
        """Rows under one Triton release, None for the one that is here; prints its table.

        Args:
            recompile: rows of earlier runs count for nothing.
        """
        path: list[str] = []
        if release is not None:
            with self.console.status(f"installing Triton {release}, once"):
                path = [str(install(release, compiler_state.cache_dir() / "releases"))]
        about = compilers(path)
        row_cache, failed = RowCache(about, recompile), []
        self.without, before = {}, os.times()
        known: list[support_matrix.Row] = []
        with bar(self.console) as progress, TemporaryDirectory() as cache:
            task = progress.add_task(f"kernels, Triton {about['triton']}", total=0)

            def tasks() -> Iterator[support_matrix.Task]:
                total = 0
                for arch, found in find_everywhere(
                    self.samples, self.shapes, self.archs, self.backward, about, processes
                ):
                    self._without_kernels(arch, about["triton"], found)
                    tasks = cover(found.tasks, self.variants[arch], row_cache.known)
                    same, changed = row_cache.split(tasks)
                    known.extend(same)
                    total += len(changed)
                    progress.update(task, total=total)
                    yield from changed

            def done(job: Job, row: support_matrix.Row) -> None:
                progress.advance(task)
                if row.status in ("crash", "hang"):
                    failed.append(row)
                else:
                    row_cache.add(job, row)

            rows = support_matrix.run(
                tasks(),
                processes=processes,
                timeout=timeout,
                path=path,
                env={"TRITON_CACHE_DIR": cache},
                done=done,
            )
        self.console.print(
            f"{len(rows)} compiled, {len(known)} kept from earlier runs; {_elapsed(before)}"
        )
        rows = support_matrix.ordered(rows + known)
        out = Console()
        out.width = max(out.width, _WIDTH)
        self._show(rows, out)
        for row in failed:
            self.console.print(
                f"[red]{row.status}[/] {row.arch} {row.kernel}: {escape(row.reason)}"
            )
        return rows

    def _without_kernels(self, arch: str, release: str, found: KernelsFound) -> None:
        """Keeps why operators have none, and says what could not be traced."""
        self.without[release, arch] = found.without
        for failure in found.failures:
            self.console.print(f"[red]failed[/] {escape(failure)}")
        self.failures += found.failures

    def _show(self, rows: Sequence[support_matrix.Row], out: Console) -> None:
        """Prints the status of each operator, and the meaning of the words."""
        cells = support_matrix.by_operator(rows)
        table, seen = Table(), set()
        for name in ("operator", *self.archs):
            table.add_column(name, no_wrap=True)
        for operator, found in cells.items():
            cells = [found.get(x, ("-", ""))[0] for x in self.archs]
            seen.update(cells)
            coloured = [f"[{_COLOURS.get(x, 'dim')}]{x}[/]" for x in cells]
            table.add_row(operator, *coloured)
        release = rows[0].triton if rows else "none"
        said = counts(x.status for x in rows)
        out.print(f"Triton {release}, kernels: {said}. An operator has the worst of its kernels.")
        out.print(table, crop=False)
        out.print(legend(seen), highlight=False)


def _elapsed(before: os.times_result) -> str:
    """By the clock, and of processors, ours and the compilers'."""
    *processors, clock = (now - then for now, then in zip(os.times(), before))
    return f"{clock / 60:.1f} minutes, {sum(processors) / 60:.1f} of processor time"


def compilers(path: Sequence[str]) -> dict[str, str]:
    """The compilers of a child process with these folders before its sys.path."""
    worker = Worker(path)
    worker.start()
    worker.close()
    return dict(worker.about)


def line(row: support_matrix.Row) -> str:
    """A kernel in one line."""
    used = "".join(f", {v} {k}" for k, v in (row.instructions or {}).items() if v)
    constants = " ".join(f"{k}={v}" for k, v in row.constants.items() if v != "False")
    sizes = f"{row.shared} bytes of shared memory, {row.registers} registers and {row.stack} bytes"
    sizes += f" of stack a thread{used},"
    about = f"{row.arch} {row.kernel} warps={row.warps} stages={row.stages} {constants}"
    return f"{row.status:8}{about}: {sizes} {row.seconds:.1f} s {row.reason}"


def record(rows: Sequence[support_matrix.Row], run: MatrixRun, whole: bool = True) -> None:
    """Adds the rows to docs/support.json and writes what is made from it. Without the whole of the
    operators only the cells of some change, and no family of kernels becomes verified."""
    data = support_data.read(DATA)
    for (release, arch), without in run.without.items():
        found = [x for x in rows if (x.triton, x.arch) == (release, arch)]
        cells = {k: v[arch] for k, v in support_matrix.by_operator(found).items()}
        cells |= {k: ("torch", v) for k, v in without.items()}
        about = {
            "ptxas": found[0].ptxas if found else "",
            "variants": run.variants[arch],
            "shapes": len(run.shapes),
            "kernels": len(found),
            "date": date.today().isoformat(),
        }
        known = data.setdefault(release, {}).setdefault(arch, about | {"operators": {}})
        known |= {**about, "operators": {}} if whole else {}
        known["operators"] |= cells
    write_data(data)
    _record_verified(rows, whole)


def write_data(data: support_data.Data) -> None:
    """Writes docs/support.json, and docs/SUPPORT.md from it."""
    support_data.write(DATA, data)
    write_text(PAGE, page(support_data.read(DATA)))


def _record_verified(rows: Sequence[support_matrix.Row], whole: bool) -> None:
    """Writes down the families of kernels that came out sound, with digests of their sources; those
    that did not are verified no longer."""
    trusted = {
        (x["arch"], x["triton"], x["ptxas"]): x["families"]
        for x in json.loads(VERIFIED.read_text())
    }
    for compiler, families in support_matrix.verified(rows).items():
        now = compiler_state.families(compiler_state.uses_gluon(*compiler[:2]))
        if whole:
            trusted[compiler] = {x: now[x] for x in sorted(families)}
        elif compiler in trusted:
            of = (x for x in rows if (x.arch, x.triton, x.ptxas) == compiler)
            unsound = {compiler_state.family_of(x.module) for x in of} - families
            trusted[compiler] = {k: v for k, v in trusted[compiler].items() if k not in unsound}
    write_verified(trusted)


def write_verified(families: Mapping[tuple[str, str, str], Mapping[str, str]]) -> None:
    """Writes compiler/verified.json: (arch, Triton, ptxas) -> family -> digest; and beside it the
    digests of the kernels as they are, which are not made anew then."""
    rows = [
        {**dict(zip(("arch", "triton", "ptxas"), key)), "families": families[key]}
        for key in sorted(families)
    ]
    lines = ",\n".join(json.dumps(x) for x in rows)
    write_text(VERIFIED, f"[\n{lines}\n]\n")
    found: dict[str, str] = {}
    for gluon in (True, False):
        keys = source_digest.contents_of(compiler_state.files_of(gluon))
        digests = compiler_state.families(gluon)
        found |= {key: digests[name] for name, key in keys.items()}
    text = json.dumps(found, indent=0, sort_keys=True)
    write_text(VERIFIED.with_name(source_digest.PACKAGED.name), f"{text}\n")
    compiler_state.verified.cache_clear()


def page(data: dict) -> str:
    """The text of docs/SUPPORT.md."""
    footnotes: list[str] = []
    lines = [_HEAD]
    everything = [cells["operators"] for archs in data.values() for cells in archs.values()]
    names = sorted({name for cells in everything for name in cells})
    plain = [x for x in names if all(y[x][0] == "torch" for y in everything if x in y)]
    for release in sorted(data, key=version, reverse=True):
        archs = [x for x in ARCHS if x in data[release]]
        lines += [f"\n## Triton {release}\n", f"| operator | {' | '.join(archs)} |"]
        lines.append("|---" * (len(archs) + 1) + "|")
        here = {name for x in archs for name in data[release][x]["operators"]}
        for name in (x for x in names if x in here and x not in plain):
            row = [_cell(data[release][x], x, release, name, footnotes) for x in archs]
            lines.append(f"| {name} | {' | '.join(row)} |")
        known = [(x, data[release][x]) for x in archs]
        ptxas = ", ".join(f"{x} {y['ptxas']}" for x, y in known if y["ptxas"])
        counts = ", ".join(f"{x} {y['kernels']} ({_chosen(y)})" for x, y in known)
        lines.append(f"\nptxas: {ptxas or 'none'}. Kernels compiled: {counts}.")
        dated = [(y["date"], x) for x, y in known if "date" in y]
        days = {day: [x for other, x in dated if other == day] for day, _ in sorted(dated)}
        said = "; ".join(f"{day}: {', '.join(here)}" for day, here in days.items())
        lines += [f"\nRecorded {said}."] if days else []
    lines.append("\n## Notes\n")
    lines += [f"{i}. {x}" for i, x in enumerate(footnotes, 1)]
    lines.append("\n## In plain torch everywhere\n")
    lines += [f"- {x}: {next(y[x][1] for y in everything if x in y)}" for x in plain] or ["None."]
    unknown = sorted({x.op for x in OPERATORS} - set(names))
    if unknown:
        lines.append("\n## Not recorded yet\n")
        lines += [f"- {x}" for x in unknown]
    return "\n".join(lines) + "\n"


def _chosen(known: dict) -> str:
    """Which variants, of how many shapes if not of all that are usual."""
    shapes = known.get("shapes", len(REPRESENTATIVE))
    fewer = f", {shapes} shapes" if shapes != len(REPRESENTATIVE) else ""
    return known["variants"] + fewer


def _cell(known: dict, arch: str, release: str, name: str, footnotes: list[str]) -> str:
    """One operator's, with the number of its note."""
    if name not in known["operators"]:
        return ""
    status, reason = known["operators"][name]
    applies = applying(arch, release, known["ptxas"] or None)
    avoided = [x.name for x in applies if x.avoided]
    if status in ("ok", "slow") and avoided:
        reason += f"{'; ' if reason else ''}with workarounds for {', '.join(avoided)}"
    if reason.startswith(support_matrix.FLOAT32):
        status, reason = f"{status} in float32", reason.removeprefix(support_matrix.FLOAT32)
    if not reason:
        return status
    reason = _general(reason)
    if reason not in footnotes:
        footnotes.append(reason)
    return f"{status} [{footnotes.index(reason) + 1}]"


def _general(reason: str) -> str:
    """A reason without the figures of one kernel, so that notes stay few."""
    return "; ".join("spills" if x.startswith("spills") else x for x in reason.split("; "))


_HEAD = """# What runs where

Written by `slipstream matrix --record` ([slipstream matrix](tools/matrix.md)): every kernel of
every operator, forward and backward, for sample shapes, compiled ahead of time without a GPU. The
status of an operator is that of its worst kernel.

- ok: compiles, fits into shared memory, hardly spills, uses the tensor cores.
- slow: compiles and fits, and runs slower than it could, for the reason noted. The kernels of other
  dtypes, widths and back ends may be ok; `slipstream explain` names those of a call. "slow in
  float32": only with float32 inputs.
- refused: the compiler refuses it or it does not fit; the operator runs in plain torch there.
- crash, hang: the compiler dies or does not finish.
- torch: no kernel takes it there, plain torch does.
- empty: the operator is newer than the record. `slipstream matrix NAME --arch ARCH` compiles it.

Under each table are the days on which its columns were recorded. Kernels may have changed since
then, so that a cell may be out of date; those that have changed compile in a child process first.
[slipstream doctor](tools/doctor.md) says which they are with the Triton that is installed, and
lists the faults of compilers that the notes name.

The word beside a count of kernels says which of a kernel's variants were compiled:

- flags: a selection that has every value of every flag;
- pairs: a selection that has every pair of values;
- few: one for every operator and dtype;
- all: all variants of the sample shapes. "2 shapes": only of the first two sample shapes."""
