"""A child process that compiles: a compiler that dies or hangs takes only the child with it."""

import atexit
import contextlib
import os
import pickle
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.compiler import aot, smem_hazards

# Seconds for one kernel, after which its compiler counts as one that hangs, and for a child to
# bring in torch and Triton from a slow disk.
TIMEOUT = 300.0
# What assert() of C prints: the file without the folders of who built it, and the function.
_ASSERTION = re.compile(r".*?([^/\s:]+):\d+: .*?([\w:]+)\(.*: Assertion .*")
_SERVE = "from slipstream.compiler.compile_worker import serve; serve()"


def child_python(code: str, path: Sequence[str] = ()) -> list[str]:
    """The command that runs `code` in a child which imports what this process does.

    `python -c` looks in the folder that the program stands in first, where another `triton` may be.
    """
    return [sys.executable, "-c", f"import sys; sys.path[:] = {[*path, *sys.path]}; {code}"]


@dataclass(frozen=True)
class Outcome:
    """status: "ok", "refused" (the compiler raised, or made what reads tiles that are overwritten),
    "crash" (it died), "hang", or "absent" (no child could be started: this says nothing of the
    job)."""

    status: str
    reason: str = ""
    compiled: aot.Compiled | None = None


class Worker:
    """Compiles jobs one after another in a child, which starts with the first and restarts.

    Threads wait for each other: an answer is always that to the caller's own job.

    Args:
        path: folders that go before the parent's sys.path, such as another Triton's.
        env: variables beyond the parent's; None removes one.
    """

    def __init__(
        self, path: Sequence[str] = (), env: Mapping[str, str | None] | None = None
    ) -> None:
        self._path, self._env = list(path), dict(env or {})
        self._process: subprocess.Popen | None = None
        self._answers: queue.Queue = queue.Queue()
        self._log: Any = None
        self._lock = threading.Lock()
        self.about: Mapping[str, str] = {}
        atexit.register(self.close)

    def compile(self, job: aot.Job, timeout: float = TIMEOUT) -> Outcome:
        """The outcome of one job; never raises for what the compiler does."""
        with self._lock:
            try:
                self._start()
            except (OSError, RuntimeError) as error:  # RuntimeError: no more threads
                self.close()
                return Outcome("absent", f"no process to compile in: {error}")
            return self._ask(job, timeout)

    def _ask(self, job: aot.Job, timeout: float) -> Outcome:
        assert self._process is not None and self._process.stdin is not None
        try:
            pickle.dump(job, self._process.stdin)
            self._process.stdin.flush()
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            self.close()
            return Outcome("hang", f"the compiler had not finished after {timeout:g} s")
        except BrokenPipeError as error:
            return Outcome("crash", self._epitaph() or str(error))
        if answer is None and self._process is None:
            return Outcome("absent", "no process to compile in: it was closed meanwhile")
        return Outcome("crash", self._epitaph()) if answer is None else answer

    def start(self) -> None:
        """Starts the child if there is none; `about` then has its versions.

        Raises:
            OSError: it cannot be started, or ends at once.
        """
        with self._lock:
            self._start()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._answers = queue.Queue()
        self._process = subprocess.Popen(
            child_python(_SERVE, self._path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=self._environment(),
            start_new_session=True,
        )
        reader = threading.Thread(
            target=_pump, args=(self._process.stdout, self._answers), daemon=True
        )
        reader.start()
        try:
            about = self._answers.get(timeout=TIMEOUT)
        except queue.Empty:
            raise ChildProcessError(f"it had not started after {TIMEOUT:g} s") from None
        if about is None:
            raise ChildProcessError(self._epitaph())
        self.about = about

    def close(self) -> None:
        process, self._process = self._process, None
        log, self._log = self._log, None
        if process is None:
            if log is not None:
                log.close()
            return
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, log):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _environment(self) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        env["CUDA_VISIBLE_DEVICES"] = ""
        overrides = {k: v for k, v in self._env.items() if v is not None}
        return {k: v for k, v in env.items() if k not in self._env} | overrides

    def _epitaph(self) -> str:
        """How the child ended, and its last words."""
        process, log = self._process, self._log
        if process is None or log is None:
            return ""
        code = process.wait()
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
        telling = [x for x in lines if any(y in x for y in ("ERROR", "Assert", "error:"))]
        words = _ASSERTION.sub(r"assertion in \1, \2", (telling or lines or [""])[-1].strip())[:300]
        how = f"exit status {code}"
        if code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        return f"the compiler's process died, {how}" + (f": {words}" if words else "")


def _pump(stream: Any, answers: queue.Queue) -> None:
    try:
        while True:
            answers.put(pickle.load(stream))
    except (EOFError, OSError, ValueError, pickle.UnpicklingError):
        answers.put(None)


def serve() -> None:
    """The child: jobs from stdin, outcomes to stdout, all that anyone prints to stderr."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from slipstream.compiler.toolchain import versions

    _answer(answers, versions())
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        _answer(answers, _compiled(job))


def _end_with(parent: int) -> None:
    """A compiler that hangs is not to outlive a parent that was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _answer(stream: Any, answer: Any) -> None:
    pickle.dump(answer, stream)
    stream.flush()


def _compiled(job: aot.Job) -> Outcome:
    try:
        compiled = job.compile()
    except Exception as error:  # whatever a compiler raises is the answer
        return Outcome("refused", f"{type(error).__name__}: {_telling(str(error))}")
    if hazards := smem_hazards.find_hazard(str(compiled.asm.get("ttgir", ""))):
        return Outcome("refused", hazards[0])
    return Outcome("ok", compiled=replace(compiled, asm={}))


def _telling(text: str) -> str:
    """The line of a compiler's message that says what is wrong."""
    lines = [x.strip() for x in text.splitlines() if x.strip() and set(x.strip()) != {"^"}]
    for line in lines:
        if "rror" in line:
            return line[:300]
    return (lines or [""])[-1][:300]
