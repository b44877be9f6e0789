"""Compiles all kernels of a call side by side, before the first of them is launched.

Triton compiles a kernel when it is launched, one after the other; most of that time is spent
outside of Python's lock. So the first call of its kind runs twice: once in which launches only
compile, in threads, and operations of torch write to nothing that was there before; then as it is.
Nothing that a call decides depends on what is in its tensors, since it does not wait for the GPU.
So both runs want the same kernels.

Threads begin when the call has run: each operation of torch gives up Python's lock, and would wait
to get it back from whoever makes a kernel's first form out of its source, which holds it. That is
done one kernel at a time, those first that take longest to compile: at the end of it little is left
to do. The digest of Triton (compiler/triton_cache_key.py) is made before, if it has to be: it asks
for Python's lock some 800 times. The C part of Triton's driver (compiler/triton_driver.py) is built
meanwhile, and that of a kernel's launch beside the kernel.

Several processes that begin with one empty cache of Triton's compile each kernel once: the first to
come holds a lock in the kernel's folder of that cache, and the others wait for what it makes.
"""

import contextlib
import gc
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from functools import partial
from inspect import getclosurevars
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.compiler import triton_cache_key, triton_driver
from slipstream.runtime.launch_cache import of_thread
from slipstream.runtime.token_ids import WrongId

# Kernels that take more than half a second of a processor's time, the longest first.
LONGEST = (
    "softmax_bwd_sm90_kernel",
    "delta_chunk_bwd_sm90_kernel",
    "dplr_intra_safe_sm90_kernel",
    "kda_fused_fwd_sm90_kernel",
    "softmax_fwd_sm90_kernel",
    "vector_decay_dqkg_kernel",
    "dplr_intra_safe_bwd_sm90_kernel",
    "dplr_wy_sm90_kernel",
    "scalar_decay_chunk_bwd_sm90_kernel",
    "dplr_dqkg_sm90_kernel",
    "dplr_chunk_fwd_sm90_kernel",
    "scalar_decay_chunk_fwd_sm90_kernel",
    "delta_chunk_fwd_sm90_kernel",
    "conv_bwd_kernel",
    "vector_decay_scores_kernel",
    "delta_chunk_dstate_sm90_kernel",
    "vector_decay_intra_fwd_kernel",
    "conv_fwd_kernel",
    "dplr_chunk_dstate_sm90_kernel",
    "delta_segment_transition_sm90_kernel",
    "delta_solve_tril_sm90_kernel",
    "delta_state_passing_sm90_kernel",
    "scalar_decay_dg_kernel",
    "matmul_sm90_kernel",
    "dplr_scores_sm90_kernel",
    "dplr_scores_kernel",
)
# Triton changes the process's warning filters while it reads a kernel's source, and then puts back
# those it found. Of two threads, each with a call of its own, the later would put back the
# earlier's.
_FRONT_END = threading.Lock()
# Seconds for another process to compile a kernel; after that this one does it, too.
PATIENCE = 120

# Set while no thread of the program waits for its kernels: others are compiled then alone
# (runtime/compile_ahead.py).
idle = threading.Event()
idle.set()


def compile_kernels(call: Callable[..., Any], args: Sequence[Any]) -> None:
    """Compiles the kernels of call(*args). A failure is raised by the call itself.

    Raises:
        ValueError: for a wrong index that an earlier call's kernel has found, which is told once.
    """
    captures = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if captures or not is_possible():
        return
    # a thread may only wait: for its turn, for another process, for the assembler
    threads = 2 * (os.cpu_count() or 1)
    idle.clear()
    try:
        with _no_collections(), ThreadPoolExecutor(threads) as pool:
            try:
                ready = pool.submit(triton_cache_key.finish)
                pool.submit(triton_driver.begin())
            except RuntimeError:  # there are no threads: too many, or the interpreter ends
                return
            wait([ready])  # it would take several times as long beside the call
            with only_compiling(pool, ready), _ProtectInputs():
                call(*args)
    finally:
        idle.set()


def is_possible() -> bool:
    """Whether this thread's launches can only compile: in Triton's releases that have threads for
    it, and not within another such call."""
    try:
        from triton.runtime._async_compile import active_mode
    except ImportError:  # another release
        return False
    # on AMD's GPUs a launch is Triton's, which would wait for its kernel
    return not torch.version.hip and of_thread.warmup is None and active_mode.get() is None


@contextlib.contextmanager
def only_compiling(
    pool: Any, ready: Future, is_wanted: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Launches of this thread compile their kernels, in the pool, which begins at the end of the
    block. Errors of the block are dropped: the call itself raises them. Returns when all are done.

    Args:
        ready: what the first launch waits for.
        is_wanted: asked before each compilation whether that is to be.
    """
    from triton.runtime._async_compile import AsyncCompileMode, active_mode

    class Mode(AsyncCompileMode):
        def submit(self, key: Any, compile_fn: Callable[[], Any], *after: Any) -> Any:
            """after: what Triton does with the kernel; from 3.9 on two functions, 3.6 has one."""
            if key not in self.future_kernels:
                compile_fn = _Task(key, compile_fn, is_wanted)
            return super().submit(key, compile_fn, *after)

        def __exit__(self, *error: Any) -> None:
            try:
                super().__exit__(*error)
            finally:  # also where the user interrupts: later launches would wait for this mode
                active_mode.set(None)

    later = _Later()
    executor: Any = later
    with Mode(executor, ignore_errors=True):
        of_thread.warmup = ready
        try:
            yield
        except WrongId:
            raise
        except Exception:
            pass
        finally:
            of_thread.warmup = None
            later.start(pool)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Turns Python's garbage collector off: its searches took a seventh of the time in which the
    kernels' first forms are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Task:
    """Compiles a kernel. It waits for `before` to be set before it takes Python's lock to make the
    kernel's first form, and sets `done` after that."""

    def __init__(
        self, key: Any, compile_fn: Callable[[], Any], is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        self._compile, self._once, self.name = compile_fn, _Once(), ""
        self._is_wanted = is_wanted
        self.before, self.done = threading.Event(), threading.Event()
        self.claimed = threading.Lock()
        self.pool: Any = None
        self._launcher: Future | None = None
        with contextlib.suppress(Exception):
            self._src = src = getclosurevars(compile_fn).nonlocals["src"]
            src.make_ir = partial(self._make_ir, src.make_ir)
            self._once, self.name = _Once(key, src.name), src.name

    @property
    def order(self) -> int:
        return LONGEST.index(self.name) if self.name in LONGEST else len(LONGEST)

    def __call__(self) -> Any:
        self.before.wait()
        try:
            if not self._is_wanted():
                raise CancelledError
            try:
                kernel = self._compile()
            except _Elsewhere:
                self._once.wait()
                kernel = self._compile()  # finds it in the cache, or makes it now
            self.done.set()
            if self._launcher is not None and not self._launcher.cancel():
                self._launcher.exception()  # which the next line would raise, too
            return _with_launcher(kernel)
        finally:
            self._once.release()
            self.done.set()

    def _make_ir(self, make_ir: Callable[..., Any], *args: Any) -> Any:
        try:
            if self._once.is_elsewhere():
                raise _Elsewhere
            with _FRONT_END:
                made = make_ir(*args)
            with contextlib.suppress(RuntimeError):  # no thread is left
                if self.pool is not None:
                    self._launcher = self.pool.submit(_build_launcher, self._src)
            return made
        finally:
            self.done.set()


class _Later:
    """An executor that collects tasks, and begins them in `start`, when all are known."""

    def __init__(self) -> None:
        self._tasks: list[tuple[_Task, Future]] = []

    def submit(self, task: _Task) -> Future:
        future: Future = Future()
        self._tasks.append((task, future))
        return future

    def start(self, pool: Any) -> None:
        """Each task after what the one before has done with Python's lock."""
        free = threading.Event()
        free.set()
        for task, future in sorted(self._tasks, key=lambda x: x[0].order):
            task.before, free, task.pool = free, task.done, pool
            try:
                pool.submit(_settle, future, task)
            except RuntimeError:  # as there are no more threads, in this one
                _settle(future, task)


def _settle(future: Future, task: _Task) -> None:
    """Settles it once: a pool without another thread keeps what it was given, and raises."""
    if not task.claimed.acquire(blocking=False):
        return
    try:
        future.set_result(task())
    except BaseException as error:
        future.set_exception(error)


class _Elsewhere(Exception):
    """Another process compiles the kernel, or has just done so."""


class _Once:
    """The lock of a kernel among processes. A thread asks for it when its kernel's turn has come:
    one that holds a lock waits for nothing, and one that waits holds none."""

    def __init__(self, key: str | None = None, name: str = "") -> None:
        self._lock: Any = None
        self._folder: Any = None
        self._entry, self._asked = f"{name[:150]}.json", key is None
        if key is not None:
            from triton.runtime.cache import get_cache_manager

            self._folder = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())

    def is_elsewhere(self) -> bool:
        """Asked once: the kernel was not in the cache when compile_fn began."""
        if self._asked:
            return False
        self._asked = True
        from filelock import FileLock, Timeout

        try:
            lock = FileLock(Path(self._folder.cache_dir) / "slipstream.lock")
            lock.acquire(timeout=0)
        except Timeout:
            return True
        # a folder of another kind, or that cannot be written; a file system without locks
        except (OSError, AttributeError, NotImplementedError):
            return False
        self._lock = lock
        return bool(self._folder.get_group(self._entry))

    def wait(self) -> None:
        """For the other process; the lock is kept if that has left nothing."""
        from filelock import FileLock

        if self._lock is None:
            with contextlib.suppress(OSError, NotImplementedError):  # Timeout is an OSError
                lock = FileLock(Path(self._folder.cache_dir) / "slipstream.lock")
                lock.acquire(timeout=PATIENCE)
                self._lock = lock
        if self._folder.get_group(self._entry):
            self.release()

    def release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


def _build_launcher(src: Any) -> None:
    """Compiles a launcher to disk before its kernel is compiled; takes descriptors for TMA's."""
    from triton.runtime import driver

    active: Any = driver.active
    names = "global_scratch_size global_scratch_align profile_scratch_size profile_scratch_align"
    metadata = dict.fromkeys([*names.split(), "launch_cooperative_grid", "launch_pdl"], 0)
    described = [x for x in src.signature.values() if str(x).startswith("tensordesc")]
    active.launcher_cls(src, SimpleNamespace(tensordesc_meta=[{}] * len(described), **metadata))


def _with_launcher(kernel: Any) -> Any:
    """Compiles the launcher, which is C and takes up to a second, to disk; returns the kernel."""
    from triton.runtime import driver

    active: Any = driver.active
    with contextlib.suppress(Exception):
        active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


class _ProtectInputs(TorchDispatchMode):
    """Operations do not write to memory that was there before."""

    def __init__(self) -> None:
        super().__init__()
        self._own: set[int] = set()

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        by_name = dict(zip((x.name for x in func._schema.arguments), args)) | kwargs
        for x in func._schema.arguments:
            if x.alias_info is None or not x.alias_info.is_write:
                continue
            given = by_name.get(x.name)
            tensors = [y for y in tree_leaves(given) if isinstance(y, Tensor)]
            if any(_address(y) not in self._own for y in tensors):
                return given if func._schema.returns else None
        out = func(*args, **kwargs)
        before = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        after = {_address(x) for x in tree_leaves(out) if isinstance(x, Tensor)}
        self._own |= after - before
        return out


# Not in the class, where torch would wrap it in what first imports torch._dynamo, for seconds.
_ProtectInputs.__torch_dispatch__ = _ProtectInputs.dispatch


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
