"""All kernels of a call compiled side by side, before the first of them is launched.

Triton compiles a kernel when it is launched, one after the other; most of that time is spent
outside of Python's lock. So the first call of its kind runs twice: once in which launches only
compile, in threads, and operations of torch write to nothing that was there before; then as it is.
Nothing that a call decides depends on what is in its tensors, since it does not wait for the GPU.
So both runs want the same kernels.

What holds Python's lock, making the first form of a kernel out of its source, is done one kernel at
a time, in the order of the launches: else all of them were late at what needs no lock. The digest
of Triton (compiler/triton_cache_key.py) is made, if it has to be, while the kernels' modules are
imported.

Several processes that begin with one empty cache of Triton's compile each kernel once: the first to
come holds a lock in the kernel's folder of that cache, and the others wait for what it makes.
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import getclosurevars
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.compiler import triton_cache_key
from slipstream.runtime.launch_cache import of_thread
from slipstream.runtime.token_ids import WrongId

# Of a call and its gradient, that take long to compile: there are at most about fifteen.
MAX_THREADS = 16
# Seconds for another process to compile a kernel; after that this one does it, too.
PATIENCE = 120


def compile_kernels(call: Callable[..., Any], args: Sequence[Any]) -> None:
    """Of call(*args). What fails here fails again when it is called, and says so then.

    Raises:
        ValueError: for a wrong index that an earlier call's kernel has found, which is told once.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:  # another release
        return

    class Mode(AsyncCompileMode):
        """before: what the next kernel's first form waits for."""

        before = threading.Event()
        before.set()

        def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Any) -> Any:
            if key not in self.future_kernels:
                before, self.before = self.before, threading.Event()
                compile_fn = partial(_compiled, key, compile_fn, before, self.before)
            return super().submit(key, compile_fn, finalize_fn)

    captures = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    nested = of_thread.warmup is not None
    if captures or nested or active_mode.get() is not None:
        return
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool, Mode(pool, ignore_errors=True):
        of_thread.warmup = pool.submit(triton_cache_key.reuse)
        try:
            with _ProtectInputs():
                call(*args)
        except WrongId:
            raise
        except Exception:
            pass
        finally:
            of_thread.warmup = None


def _compiled(key: Any, compile_fn: Callable[[], Any], before: Any, done: Any) -> Any:
    """compile_fn(), which waits for `before` where it would hold Python's lock; then `done`."""
    once = _Once()
    with contextlib.suppress(Exception):
        src = getclosurevars(compile_fn).nonlocals["src"]
        once = _Once(key, src.name)
        src.make_ir = partial(_serialised, src.make_ir, before, done, once)
    try:
        try:
            kernel = compile_fn()
        except _Elsewhere:
            once.wait()
            kernel = compile_fn()  # finds it in the cache, or makes it now
        return _with_launcher(kernel)
    finally:
        once.release()
        done.set()


def _serialised(
    make_ir: Callable[..., Any], before: Any, done: Any, once: "_Once", *args: Any
) -> Any:
    before.wait()
    try:
        if once.is_elsewhere():
            raise _Elsewhere
        return make_ir(*args)
    finally:
        done.set()


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


def _with_launcher(kernel: Any) -> Any:
    """What launches it is C, which takes the host's compiler up to a second: left on disk."""
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
        for x, given in zip(func._schema.arguments, args):
            writes = x.alias_info is not None and x.alias_info.is_write
            if writes and isinstance(given, Tensor) and _address(given) not in self._own:
                return given
        out = func(*args, **kwargs)
        before = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        after = {_address(x) for x in tree_leaves(out) if isinstance(x, Tensor)}
        self._own |= after - before
        return out


# Not in the class, where torch would wrap it in what first imports torch._dynamo, for seconds.
_ProtectInputs.__torch_dispatch__ = _ProtectInputs.dispatch


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
