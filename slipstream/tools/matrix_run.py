"""Runs of the matrix on the terminal."""

import os
from collections.abc import Iterator, Sequence
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slipstream.compiler import compiler_state, support_matrix
from slipstream.compiler.aot import Job
from slipstream.compiler.compile_worker import Worker
from slipstream.compiler.triton_releases import install
from slipstream.tools.backend_query import KernelsFound, find_everywhere
from slipstream.tools.catalog import Sample, Shape
from slipstream.tools.matrix_cache import RowCache
from slipstream.tools.terminal import bar, counts, legend
from slipstream.tools.variant_cover import cover, resolved

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
