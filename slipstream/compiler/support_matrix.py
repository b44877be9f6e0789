"""Every kernel compiled for every architecture, in child processes, and what came of it.

A kernel is refused if the compiler refuses it or if it needs more shared memory than there is,
slow if it spills or misses the tensor cores, ok else; a compiler that dies or hangs is what the
matrix is there to find before a user does.
"""

import queue
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.compiler import compile_worker, known_bugs, toolchain
from slipstream.compiler.aot import Compiled, Job
from slipstream.compiler.arch import ARCHS, Arch, expect_fits

# Best first.
STATUSES = ("ok", "slow", "refused", "hang", "crash")
# Bytes of stack a thread beyond which a kernel counts as slow: scans keep a state in registers and
# spill some of it outside of their loops.
MAX_SPILL_BYTES = 1280


@dataclass(frozen=True)
class Row:
    """One kernel, one architecture, one Triton release.

    dtype: of the first tensor, as Triton names it.
    """

    arch: str
    triton: str
    ptxas: str
    module: str
    kernel: str
    operators: tuple[str, ...]
    status: str
    reason: str
    warps: int
    stages: int
    constants: Mapping[str, str]
    dtype: str = ""
    shared: int = 0
    registers: int = 0
    stack: int = 0
    instructions: Mapping[str, int] | None = None
    seconds: float = 0.0


Task = tuple[Job, tuple[str, ...]]


def run(
    tasks: Iterable[Task],
    *,
    processes: int = 2,
    timeout: float = compile_worker.TIMEOUT,
    path: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    done: Callable[[Job, Row], None] = lambda job, row: None,
) -> list[Row]:
    """Compiles every task (a job and the operators that want it) and judges it.

    Args:
        tasks: compiled from the first one on while others are still being found.
        path: folders before sys.path in the children: another Triton's.
        done: called with each job and row, from any thread but one at a time; what it raises ends
            the run.
    """
    if processes < 1:
        raise ValueError(f"jobs: want at least 1 process, got {processes}")
    waiting: queue.Queue[Task | None] = queue.Queue()
    rows: list[Row] = []
    errors: list[Exception] = []
    one_at_a_time = threading.Lock()

    def serve() -> None:
        worker = compile_worker.Worker(path, env)
        try:
            while (task := waiting.get()) is not None and not errors:
                row = compile_row(worker, task, timeout)
                with one_at_a_time:
                    rows.append(row)
                    done(task[0], row)
        except Exception as error:  # is raised where `run` was called
            errors.append(error)
        finally:
            worker.close()

    threads = [threading.Thread(target=serve) for _ in range(processes)]
    for thread in threads:
        thread.start()
    try:
        for task in tasks:
            waiting.put(task)
    except BaseException:
        waiting.queue.clear()
        raise
    finally:
        for _ in threads:
            waiting.put(None)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return ordered(rows)


def ordered(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda x: (x.arch, x.kernel, str(x.constants)))


def compile_row(worker: compile_worker.Worker, task: Task, timeout: float) -> Row:
    """One row; where shared memory does not suffice, the nearest number of stages that fits."""
    job, operators = task
    outcome = worker.compile(job, timeout)
    if outcome.status == "absent":
        raise ChildProcessError(outcome.reason)
    status, reason = judge(job, outcome)
    if status == "refused" and outcome.compiled is not None:
        reason = _too_large(worker, job, outcome.compiled, timeout)
    row = Row(
        arch=job.arch,
        triton=worker.about.get("triton", ""),
        ptxas=toolchain.ptxas_of(job.arch, worker.about) if worker.about else "",
        module=job.kernel.rpartition(":")[0],
        kernel=job.name,
        operators=operators,
        status=status,
        reason=reason,
        warps=job.warps,
        stages=job.stages,
        constants={k: str(v) for k, v in job.constants.items() if v is not None},
        dtype=dtype_of(job),
    )
    if outcome.compiled is not None:
        names = ("shared", "registers", "stack", "instructions", "seconds")
        row = replace(row, **{x: getattr(outcome.compiled, x) for x in names})
    if status in ("crash", "refused") and (reason := _known_bug(row)):
        row = replace(row, reason=f"{row.reason} ({reason})")
    return row


def dtype_of(job: Job) -> str:
    """ "bf16" of "*bf16" or "tensordesc<bf16[64, 64]>"."""
    first = next(iter(job.tensors.values()), "")
    return re.sub(r"^(\*|tensordesc<)|[:\[].*", "", first)


def judge(job: Job, outcome: compile_worker.Outcome) -> tuple[str, str]:
    """Status and reason of an outcome."""
    if outcome.compiled is None:
        return outcome.status, outcome.reason
    arch, got = ARCHS[job.arch], outcome.compiled
    try:
        expect_fits(job.name, got.shared, arch)
    except ValueError as error:
        return "refused", str(error)
    reasons = [_missing(arch, got, job)] if got.dots else []
    if got.stack > MAX_SPILL_BYTES:
        reasons.append(f"spills {got.stack} bytes a thread")
    said = "; ".join(x for x in reasons if x)
    return ("slow" if said else "ok"), said


def _missing(arch: Arch, got: Compiled, job: Job) -> str:
    """The instructions that products use instead of the architecture's tensor cores, if they do.

    Kernels in Gluon name each product's instruction: mma.sync beside wgmma is meant. So it is where
    every product has fewer rows than wgmma and tcgen05 take.
    """
    if arch.instruction is None:
        return "no tensor cores: Triton uses this architecture's no longer"
    # of as many rows on Triton makes a product of wgmma or tcgen05
    if 0 < got.dot_rows < 64 and got.instructions["mma.sync"]:
        return ""
    if got.instructions[arch.instruction] == 0:
        instructions = [x for x in ("wgmma", "mma.sync", "tcgen05", "mfma") if got.instructions[x]]
        return f"{' and '.join(instructions) or 'no tensor cores'} instead of {arch.instruction}"
    if arch.wgmma and got.instructions["mma.sync"] and ".sm90." not in job.kernel:
        return "some products by mma.sync instead of wgmma"
    return ""


def _too_large(worker: compile_worker.Worker, job: Job, got: Compiled, timeout: float) -> str:
    arch, nearest = ARCHS[job.arch], ""
    for stages in range(job.stages - 1, 0, -1):
        other = worker.compile(replace(job, stages=stages), timeout).compiled
        if other is not None and other.shared <= arch.shared:
            nearest = f"with {stages} stages it needs {other.shared} and runs"
            break
    try:
        expect_fits(f"{job.name} with {job.stages} stages", got.shared, arch, nearest)
    except ValueError as error:
        return str(error)
    raise AssertionError("it fits")


def _known_bug(row: Row) -> str:
    """The known fault behind a crash or a refusal, if the table has one of that effect."""
    for fault in known_bugs.applying(row.arch, row.triton, row.ptxas or None):
        if fault.effect == row.status and not fault.avoided:
            return f"{fault.name}: {fault.way_out}"
    return ""


def as_json(row: Row) -> dict[str, Any]:
    return {**row.__dict__, "operators": list(row.operators)}
