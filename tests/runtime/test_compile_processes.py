"""Kernels compiled by forked processes: the parent finds them in the cache; what a child has left,
since it died, hung or could not compile it, the parent compiles."""

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slipstream.runtime import compile_processes, parallel_compile
from slipstream.runtime.parallel_compile import _Later, _Task

triton = pytest.importorskip("triton")
PARENT = os.getpid()


@triton.jit
def _add(x_ptr, y_ptr, N: "triton.language.constexpr"):  # pyright: ignore
    at = triton.language.arange(0, N)
    x = triton.language.load(x_ptr + at)
    triton.language.store(y_ptr + at, x + 1)


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As many as children want; the cache is empty."""
    monkeypatch.setattr(compile_processes, "LEAST_PROCESSORS", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4))
    monkeypatch.setattr(parallel_compile, "_with_launcher", lambda kernel: kernel)  # wants a GPU
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def task_of(size: int, made: Path, in_child: Any = lambda: None) -> _Task:
    """Compiles a kernel for sm_90. Leaves a file that says who made its first form."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import get_cache_key, make_backend

    target = GPUTarget("cuda", 90, 32)
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "N": "constexpr"}
    src: Any = ASTSource(_add, signature, constexprs={"N": size})
    make_ir = src.make_ir

    def watched(*args: Any) -> Any:
        (made / f"{size} {os.getpid()}").touch()
        if os.getpid() != PARENT:
            in_child()
        return make_ir(*args)

    src.make_ir = watched
    backend = make_backend(target)
    key = get_cache_key(src, backend, backend.parse_options({}), {})

    def async_compile() -> Any:
        return triton.compile(src, target=target, _env_vars={})

    return _Task(key, async_compile)


def fail() -> None:
    raise ValueError("not in a child")


def run(tasks: list[_Task]) -> list[Future]:
    later = _Later()
    futures = [later.submit(x) for x in tasks]
    with ThreadPoolExecutor(4) as pool:
        later.start(pool)
        for x in futures:
            x.exception(120)
    return futures


class Without:
    """The module os, but for one function."""

    def __init__(self, name: str, instead: Any) -> None:
        setattr(self, name, instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def makers(made: Path) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for x in made.iterdir():
        size, pid = map(int, x.name.split())
        found.setdefault(size, set()).add(pid)
    return found


def expect_no_children() -> None:
    """Soon: they are waited for when the last kernel is there."""
    until = time.monotonic() + 30
    while has_children() and time.monotonic() < until:
        time.sleep(0.01)
    assert not has_children()


def has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


SIZES = (32, 64, 128, 256)


@pytest.mark.usefixtures("processors")
def test_children_compile(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    kernels = [x.result() for x in run([task_of(size, made) for size in SIZES])]
    assert all("cubin" in x.asm for x in kernels)
    pids = makers(made)
    assert pids.keys() == set(SIZES)
    assert all(len(x) == 1 and PARENT not in x for x in pids.values())
    expect_no_children()
    # a second time nobody makes any, and no child is wanted
    for x in made.iterdir():
        x.unlink()
    assert all("cubin" in x.result().asm for x in run([task_of(size, made) for size in SIZES]))
    assert not makers(made)


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("way", ["dies", "hangs", "fails"])
def test_parent_compiles_what_children_leave(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {"dies": lambda: os._exit(1), "hangs": lambda: time.sleep(1000), "fails": fail}
    if way == "hangs":
        monkeypatch.setattr(compile_processes, "PATIENCE", 5.0)
    made = tmp_path / "made"
    made.mkdir()
    tasks = [task_of(size, made, ways[way]) for size in SIZES]
    begin = time.monotonic()
    assert all("cubin" in x.result().asm for x in run(tasks))
    assert time.monotonic() - begin < 120
    assert all(PARENT in x for x in makers(made).values())
    expect_no_children()


@pytest.mark.usefixtures("processors")
def test_error_reaches_the_caller(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    tasks = [task_of(size, made) for size in (*SIZES, 48)]  # no power of two
    *kernels, wrong = run(tasks)
    assert all("cubin" in x.result().asm for x in kernels)
    assert type(wrong.exception()).__module__.startswith("triton")
    expect_no_children()


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("name", ["fork", "pipe"])
def test_threads_compile_where_nothing_can_be_forked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise OSError("no memory")

    monkeypatch.setattr(compile_processes, "os", Without(name, refuse))
    made = tmp_path / "made"
    made.mkdir()
    assert all("cubin" in x.result().asm for x in run([task_of(size, made) for size in SIZES]))
    assert all(x == {PARENT} for x in makers(made).values())


@pytest.mark.usefixtures("processors")
def test_who_does_not_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    work = [lambda: None] * 4
    found = compile_processes.begin(work)
    assert found is not None and sorted(found.finished()) == [0, 1, 2, 3]
    expect_no_children()
    assert compile_processes.begin(work[:2]) is None
    with monkeypatch.context() as off:
        off.setattr(compile_processes, "ENABLED", False)
        assert compile_processes.begin(work) is None
    monkeypatch.setattr(compile_processes.torch.distributed, "is_initialized", lambda: True)
    assert compile_processes.begin(work) is None
