"""Processes that share an empty cache of Triton's compile each kernel once; its launcher is built
meanwhile."""

import inspect
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.compiler.aot import FUSION
from slipstream.runtime import parallel_compile

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
