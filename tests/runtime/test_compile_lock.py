"""One process compiles a kernel that several want, or each where that cannot be."""

import inspect
import multiprocessing
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import pytest

import slipstream
from slipstream.compiler.aot import FUSION
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


triton = pytest.importorskip("triton")
PROCESSES = 8


def _add(x_ptr, y_ptr, N: "triton.language.constexpr"):  # pyright: ignore
    at = triton.language.arange(0, N)
    x = triton.language.load(x_ptr + at)
    triton.language.store(y_ptr + at, x + 1)


def compile_one(begin: Any, made: Path, fails: bool) -> None:
    """A launch's compilation, as AsyncCompileMode is given it; who makes the kernel says so."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import get_cache_key, make_backend

    target = GPUTarget("cuda", 90, 32)
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "N": "constexpr"}
    src = ASTSource(triton.jit(_add), signature, constexprs={"N": 128})
    make_ir = src.make_ir

    def counted(*args: Any) -> Any:
        (made / str(os.getpid())).touch()
        if fails and len(list(made.iterdir())) == 1:
            os._exit(1)  # as a process that is killed while it holds the lock
        return make_ir(*args)

    src.make_ir = counted
    backend = make_backend(target)
    key = get_cache_key(src, backend, backend.parse_options(FUSION), {})

    def async_compile() -> Any:
        return triton.compile(src, target=target, options=FUSION, _env_vars={})

    begin.wait()
    task = parallel_compile._Task(key, async_compile)
    task.before.set()
    kernel = task()
    assert task.done.is_set()
    assert "cubin" in kernel.asm


@pytest.mark.parametrize("fails", [False, True], ids=["all live", "first dies"])
def test_one_process_compiles(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made"
    made.mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    # which wants a GPU
    monkeypatch.setattr(parallel_compile, "_with_launcher", lambda kernel: kernel)
    context = multiprocessing.get_context("fork")
    begin = context.Barrier(PROCESSES)
    started = [
        context.Process(target=compile_one, args=(begin, made, fails)) for _ in range(PROCESSES)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
    assert sorted(x.exitcode for x in started) == [0] * (PROCESSES - fails) + [1] * fails
    assert len(list(made.iterdir())) == 1 + fails


def _copy(desc, y_ptr, N: "triton.language.constexpr"):  # pyright: ignore
    at = triton.language.arange(0, N)
    x = desc.load([0, 0])
    triton.language.store(y_ptr + at[:, None] * N + at[None, :], x + 1)


@pytest.mark.parametrize(
    ("fn", "first"), [(_add, "*fp32"), (_copy, "tensordesc<fp32[16, 16]>")], ids=["plain", "TMA"]
)
def test_launcher_is_built_beside_its_kernel(
    fn: Any, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is built before a kernel is compiled is what its launch wants."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.compiler import ASTSource
    from triton.runtime import driver

    if not hasattr(nvidia, "make_launcher"):
        pytest.skip("from Triton 3.7 on one launcher does for all kernels")
    built: list[tuple[str, bool]] = []
    kernels: list[Any] = []

    def compile_module(src: str, **options: Any) -> Any:
        built.append((src, bool(kernels)))
        return SimpleNamespace(launch=None)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvidia, "compile_module_from_src", compile_module)
    monkeypatch.setattr(nvidia, "library_dirs", list)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(launcher_cls=nvidia.CudaLauncher))
    name, *_ = inspect.signature(fn).parameters
    signature = {name: first, "y_ptr": "*fp32", "N": "constexpr"}
    src = ASTSource(triton.jit(fn), signature, constexprs={"N": 16})

    def async_compile() -> Any:
        target = GPUTarget("cuda", 90, 32)
        kernels.append(triton.compile(src, target=target, options=FUSION, _env_vars={}))
        return kernels[0]

    later = parallel_compile._Later()
    future = later.submit(parallel_compile._Task("a kernel", async_compile))
    with ThreadPoolExecutor(2) as pool:
        later.start(pool)
        future.result()
    assert [after for _, after in built] == [False, True]
    assert built[0][0] == built[1][0]
