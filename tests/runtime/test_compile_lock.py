"""The lock of a kernel among processes, where the file system of Triton's cache has none; and whose
turn it is in one process."""

import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import pytest

import slipstream
from slipstream.runtime import parallel_compile
from slipstream.runtime.launch_cache import of_thread
from slipstream.runtime.parallel_compile import LONGEST, _Later, _Once, _Task

_async_compile = pytest.importorskip("triton.runtime._async_compile")
active_mode = _async_compile.active_mode


@pytest.mark.parametrize("error", [NotImplementedError, PermissionError])
def test_without_locks_every_process_compiles(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def acquire(self: Any, **options: Any) -> None:
        raise error

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    once = _Once("some kernel", "some_kernel")
    assert not once.is_elsewhere()
    once.wait()
    once.release()
    assert not list(tmp_path.rglob("*.json"))


def test_warning_filters_outlive_compilations_side_by_side() -> None:
    """Of two calls, each in a thread of its own: Triton's visitor changes the process's filters,
    and sets those it found when it ends."""
    before, begun, ended = list(warnings.filters), threading.Barrier(2), threading.Event()

    def visit(first: bool) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PendingDeprecationWarning)
            if first:  # the other begins meanwhile, and ends later
                time.sleep(0.05)
            else:
                ended.wait(0.2)

    def compile_one(first: bool) -> None:
        task = _Task(None, lambda: None)
        begun.wait()
        if not first:
            time.sleep(0.02)
        task._make_ir(visit, first)
        if first:
            ended.set()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(compile_one, first) for first in (True, False)]:
            done.result()
    found = list(warnings.filters)
    warnings.filters[:] = before
    assert found == before


class FewThreads(ThreadPoolExecutor):
    """A pool on a system that gives no more threads; what is submitted stays in the queue."""

    def __init__(self, number: int) -> None:
        super().__init__(8)
        self.number = number

    def _adjust_thread_count(self) -> None:
        if len(self._threads) >= self.number:
            raise RuntimeError("can't start new thread")
        super()._adjust_thread_count()


@pytest.mark.parametrize("threads", [0, 1])
def test_without_more_threads_all_kernels_are_compiled(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_compile, "_with_launcher", lambda kernel: kernel)
    came: list[int] = []

    def compile_fn(n: int) -> int:
        time.sleep(0.01)
        came.append(n)
        return n

    later = _Later()
    futures = [later.submit(_Task(None, partial(compile_fn, n))) for n in range(4)]
    with FewThreads(threads) as pool:
        later.start(pool)
    assert [x.result(timeout=0) for x in futures] == came == [0, 1, 2, 3]


def test_without_threads_kernels_are_compiled_by_their_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[int] = []
    monkeypatch.setattr(parallel_compile, "ThreadPoolExecutor", lambda _: FewThreads(0))
    parallel_compile.compile_kernels(called.append, (1,))
    assert not called and active_mode.get() is None and of_thread.warmup is None


def test_call_begins_once_keys_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made beside the call takes several times as long."""
    steps: list[str] = []

    def finish() -> None:
        time.sleep(0.05)
        steps.append("keys")

    monkeypatch.setattr(parallel_compile.triton_cache_key, "finish", finish)
    parallel_compile.compile_kernels(steps.append, ("call",))
    assert steps == ["keys", "call"]


def test_long_kernels_are_there() -> None:
    text = "".join(x.read_text() for x in Path(slipstream.__file__).parent.rglob("kernels/**/*.py"))
    assert all(f"def {name}(" in text for name in LONGEST)
