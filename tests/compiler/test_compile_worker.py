"""Compilations in a child: the parent outlives an abort, a kill and a hang of the compiler."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.compiler import compile_worker as module
from slipstream.compiler.aot import Job
from slipstream.compiler.compile_worker import Outcome, Worker, child_python
from tests.support import wants
from tests.support.processes import run_all

pytestmark = wants.compiler


def test_worker_outlives_its_compiler() -> None:
    def job(what: str) -> Job:
        kernel = "tests.support.planted_bugs:planted_kernel"
        return Job(kernel, {"x_ptr": "*i32"}, {"WHAT": what}, {}, 1, 1, {}, "sm_80")

    with closing(Worker()) as worker:
        assert worker.compile(job("nothing")).status == "ok"
        first = worker.about
        assert set(first) == {"triton", "ptxas", "ptxas_blackwell"}
        refused = worker.compile(job("raise"))
        assert refused.status == "refused" and "planted refusal" in refused.reason
        asserted = worker.compile(job("assert"))
        assert asserted.status == "crash" and "SIGABRT" in asserted.reason
        assert asserted.reason.endswith(": assertion in Scheduler.cpp, some::Scheduler::order")
        killed = worker.compile(job("kill"))
        assert killed.status == "crash" and "SIGKILL" in killed.reason
        worker.start()
        hung = worker.compile(job("hang"), timeout=0.2)
        assert hung.status == "hang" and "0.2 s" in hung.reason
        assert worker.compile(job("nothing")).status == "ok"


def test_child_imports_what_its_parent_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program may stand in a folder that has another package of that name."""
    for name in "slipstream", "triton":
        (tmp_path / f"{name}.py").write_text("raise ImportError('another')")
    monkeypatch.setattr(sys, "path", [os.path.abspath(x) for x in sys.path])
    monkeypatch.chdir(tmp_path)
    with closing(Worker()) as worker:
        kernel = "tests.support.planted_bugs:planted_kernel"
        job = Job(kernel, {"x_ptr": "*i32"}, {"WHAT": "nothing"}, {}, 1, 1, {}, "sm_80")
        assert worker.compile(job).status == "ok"
    code = "import slipstream; print(slipstream.__file__)"
    found = subprocess.run(child_python(code), capture_output=True, text=True, check=True)
    assert found.stdout.strip() == slipstream.__file__


_HANGS = """
from slipstream.compiler.aot import Job
from slipstream.compiler.compile_worker import Worker
worker = Worker()
worker.start()
print(worker._process.pid, flush=True)
kernel = "tests.support.planted_bugs:planted_kernel"
worker.compile(Job(kernel, {"x_ptr": "*i32"}, {"WHAT": "hang"}, {}, 1, 1, {}, "sm_80"))
"""


def test_hanging_compiler_ends_with_parent() -> None:
    path = os.pathsep.join(sys.path)
    parent = subprocess.Popen(
        [sys.executable, "-c", _HANGS],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    time.sleep(1.0)  # it hangs
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for _ in range(100):
        if not _runs(child):
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the child outlived its parent by 10 s")


def _runs(pid: int) -> bool:
    """A zombie does not: who should have waited for it is gone."""
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return listed.stdout.strip()[:1] not in ("", "Z")


def test_threads_get_the_outcome_of_their_own_job() -> None:
    def job(what: str) -> Job:
        kernel = "tests.support.planted_bugs:planted_kernel"
        return Job(kernel, {"x_ptr": "*i32"}, {"WHAT": what}, {}, 1, 1, {}, "sm_80")

    worker = Worker()
    outcomes: dict[int, Outcome] = {}

    def compile(i: int) -> None:
        outcomes[i] = worker.compile(job("raise" if i % 2 else "nothing"))

    threads = [threading.Thread(target=compile, args=(i,)) for i in range(32)]
    with closing(worker):
        run_all(threads)
    got = [outcomes[i].status for i in range(32)]
    assert got == ["ok", "refused"] * 16


def test_threads_start_one_child(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    def start(self: Any) -> None:
        steps.append("begins")
        time.sleep(0.02)
        steps.append("is there")

    monkeypatch.setattr(Worker, "_start", start)
    worker = Worker()
    threads = [threading.Thread(target=worker.start) for _ in range(3)]
    run_all(threads)
    assert steps == ["begins", "is there"] * 3


def test_worker_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    job: Any = None
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "TemporaryFile", fails)
        assert Worker().compile(job).status == "absent"
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", fails)
        assert Worker().compile(job).status == "absent"
    missing = "import nothing_of_that_name"
    for serve, words in ((missing, "nothing_of_that_name"), ("pass", "died, exit status 0")):
        monkeypatch.setattr(module, "_SERVE", serve)
        with closing(Worker()) as worker:
            outcome = worker.compile(job)
        assert outcome.status == "absent" and words in outcome.reason
