"""Compiles every kernel for every architecture and Triton release, without a GPU, and records it.

    python tools/matrix.py                             every kernel, every architecture
    python tools/matrix.py kda gla --arch sm_80,sm_90  some operators
    python tools/matrix.py --triton 3.7.1,3.8.0        under these releases
    python tools/matrix.py chunk_kda --kernels         a line for every kernel, for tuning
    python tools/matrix.py --record                    and write docs/SUPPORT.md (support_page.py)

Exit status 1 if a compiler died or did not finish, or if something could not be traced, of which
nothing is recorded. docs/dev/matrix.md says more.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory

import own_checkout  # noqa: F401
import support_page
from layer_samples import LAYER_SAMPLES
from matrix_cache import RowCache
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from triton_releases import install
from variant_cover import VARIANTS, cover, resolved

from slipstream.compiler import compiler_state, support_matrix
from slipstream.compiler.aot import Job
from slipstream.compiler.arch import ARCHS, named
from slipstream.compiler.compile_worker import TIMEOUT, Worker
from slipstream.runtime.files import write_text
from slipstream.tools.backend_query import KernelsFound, find_kernels
from slipstream.tools.catalog import FURTHER, REPRESENTATIVE, Sample, Shape, chosen
from slipstream.tools.terminal import bar

STATUSES = {
    "ok": "compiles, fits into shared memory, hardly spills, uses the tensor cores",
    "slow": "compiles and fits, but spills registers or misses the tensor cores",
    "refused": "the compiler refuses it or it does not fit: such calls run in plain torch",
    "hang": "the compiler does not finish",
    "crash": "the compiler dies",
    "torch": "no kernel takes it there, plain torch does",
    "-": "not looked at",
}
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
        cells = support_page.by_operator(rows)
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


def find_everywhere(
    samples: Sequence[Sample],
    shapes: Sequence[Shape],
    archs: Sequence[str],
    backward: bool,
    compilers: Mapping[str, str],
    processes: int,
) -> Iterator[tuple[str, KernelsFound]]:
    """`find_kernels` for each architecture in a process of its own; what is done first comes first.

    To trace one takes longer than to compile its kernels, where there are processors enough.
    """
    context = multiprocessing.get_context("spawn")  # threads of torch do not survive a fork
    pool = ProcessPoolExecutor(min(processes, len(archs)), context)
    try:
        arch_of = {
            pool.submit(find_kernels, samples, shapes, arch, backward, compilers): arch
            for arch in sorted(archs, key=lambda x: not ARCHS[x].wgmma)  # most kernels: longest
        }
        for found in as_completed(arch_of):
            yield arch_of[found], found.result()
    finally:
        pool.shutdown(cancel_futures=True)


def counts(statuses: Iterable[str]) -> str:
    """As "120 ok, 3 slow"."""
    found = Counter(statuses)
    return ", ".join(f"{found[x]} {x}" for x in STATUSES if found[x]) or "none"


def legend(statuses: Iterable[str]) -> str:
    """The meaning of each status, a line each."""
    seen = set(statuses)
    return "\n".join(f"{x}: {what}" for x, what in STATUSES.items() if x in seen)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("operators", nargs="*", help="names such as kda; without any, every kernel")
    parser.add_argument("--arch", help="such as sm_80,sm_90; by default all")
    parser.add_argument("--triton", help="releases, such as 3.6.0,3.7.1; by default the one here")
    parser.add_argument("--jobs", type=int, default=2, help="how many compilers run at once")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds for a compiler")
    parser.add_argument("--shapes", type=int, default=7, help="how many of the 12 sample shapes")
    parser.add_argument("--forward", action="store_true", help="compile no kernels of gradients")
    parser.add_argument("--kernels", action="store_true", help="print a line for every kernel")
    parser.add_argument("--json", type=Path, help="a file for the rows of all kernels")
    parser.add_argument("--variants", default="auto", help=f"one of {', '.join(VARIANTS)}")
    parser.add_argument("--all", action="store_true", help="compile what has not changed, too")
    parser.add_argument("--record", action="store_true", help="write docs/SUPPORT.md and the rest")
    args = parser.parse_args(argv)
    try:
        return _run(args)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


def _run(args: argparse.Namespace) -> int:
    if args.shapes < 1:
        raise ValueError(f"--shapes: want at least 1, got {args.shapes}")
    samples = [*chosen(args.operators), *([] if args.operators else LAYER_SAMPLES)]
    archs = [named(x).name for x in args.arch.split(",")] if args.arch else list(ARCHS)
    sizes = (*REPRESENTATIVE, *FURTHER)[: args.shapes]
    if args.json is not None:
        args.json.open("a").close()  # better now than after the run
    run = MatrixRun(samples, sizes, archs, not args.forward, args.variants)
    rows = []
    for release in args.triton.split(",") if args.triton else [None]:
        found = run.compile(release, args.jobs, args.timeout, args.all)
        rows += found
        for row in found if args.kernels else ():
            print(line(row))
        if args.record and not run.failures:
            support_page.record(found, run, whole=not args.operators)
    if args.json is not None:
        write_text(
            args.json, json.dumps([support_matrix.as_json(x) for x in rows], indent=1) + "\n"
        )
    if args.record and run.failures:
        print("not recorded: what could not be traced is missing", file=sys.stderr)
    return int(bool(run.failures) or any(x.status in ("crash", "hang") for x in rows))


if __name__ == "__main__":
    sys.exit(main())
