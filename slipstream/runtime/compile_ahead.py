"""Kernels that calls of other sizes ask for, compiled while the program goes on.

The first call of an operator waits for its own kernels alone (runtime/parallel_compile.py). Other
numbers of tokens, sequences or keys take others of a short list (Size). So an operator that says
what its arguments are in other sizes has those compiled after that, once no operator has been
called for the first time for a second: after a model's first step, in threads that leave the
processor to whoever waits for a kernel. The calls run on fake tensors: they take none of the GPU's
memory and launch nothing. A call that needs a kernel that failed here compiles it again. Where the
first compilation of a kernel is in a child process (runtime/guarded_launch.py),
that is done here, too; verdicts are those of real calls alone.

    SLIPSTREAM_AHEAD   on, or off

The sizes ask between them for every kernel variant that any size asks for. What a call computes,
its widths, heads, dtypes and options, says which kernels it can take; its sizes choose among a few
ways through them: tokens one after the other or in chunks, with fewer programs than the GPU has
multiprocessors or with more, with sequences cut into segments where they are few and long. No
number of tokens, rows or sequences is compiled into a kernel.
"""

import atexit
import contextlib
import os
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from slipstream.common.checks import is_on
from slipstream.compiler import arch, triton_cache_key
from slipstream.compiler.compiler_state import compiler_state
from slipstream.runtime import backends, launch_cache, parallel_compile


class Size(NamedTuple):
    """A batch of B rows of T tokens, or `sequences` packed in one row of T. keys: of a cache, per
    sequence; 0: as many as there are tokens."""

    B: int
    T: int
    sequences: int = 0
    keys: int = 0


# Tokens of a sequence, and of all sequences together how many heads there are at most. The numbers
# of heads are the last before something changes: half of an H200's 132 multiprocessors, the fused
# backward of the delta rule (96), the same of so few packed sequences that all wait for the longest
# (115), where sequences are cut into 2 to 8 segments, and a scan's channels a thread (2, 4, 8).
STEPS = (
    (1, (1, 1024)),
    (12, (1,)),
    (100, (1, 66, 95, 115, arch.named("sm_90").units)),
    (256, (1,)),
    (1024, (1, 2, 4, 8, 33)),
    (2048, (1, 16, 24, 33, 66)),
    (8192, (1, 16)),
    (40000, (1,)),
)
# Keys of a cache, of which a number of programs share a sequence's: each power of 4 that their
# number is rounded up to (attention/triton/decode_launch.py), whatever the keys of a tile.
KEYS = (1, 64, 256, 1024, 4096, 16384, 65536)


def sizes(heads: int, packed: bool) -> list[Size]:
    """Lists the distinct sizes of calls with that number of heads."""
    found: dict[Size, None] = {}
    for tokens, at_most in STEPS:
        for count in at_most:
            n = max(1, count // max(heads, 1))
            found[Size(1, n * tokens, n) if packed else Size(n, tokens)] = None
    return list(found)


class AtSizes(NamedTuple):
    """Makes the arguments of an operator in other sizes; tensors stay on their device.

    Attributes:
        tokens: places of arguments [B, T, ...], or [B T, D]. They lie in memory as they did.
        states: those [N, ...], N sequences.
        offsets: those [N + 1], which pack sequences if they are given.
        by_heads: those [B, H, T].
        heads: of an argument with a program for each entry of its dimension 2, or more.
        steps: the sizes, where they are not those of STEPS. T = 0: as many tokens as there are.
    """

    tokens: tuple[int, ...]
    states: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    by_heads: tuple[int, ...] = ()
    heads: int | None = None
    steps: tuple[Size, ...] = ()

    def __call__(self, args: tuple) -> Iterator[tuple]:
        packed = any(args[n] is not None for n in self.offsets)
        heads = 1 if self.heads is None else args[self.heads].shape[2]
        for size in self.steps or sizes(heads, packed):
            given: list[Any] = list(args)
            for n in self.tokens:
                given[n] = _of_tokens(args[n], size)
            for n in self.states:
                given[n] = resized(args[n], size.sequences or size.B)
            for n in self.offsets:
                given[n] = resized(args[n], (size.sequences or size.B) + 1)
            for n in self.by_heads:
                x = args[n]
                given[n] = None if x is None else x.new_empty(size.B, x.shape[1], size.T)
            yield tuple(given)


def _of_tokens(x: Tensor | None, size: Size) -> Tensor | None:
    if x is None or x.dim() < 2:
        return x
    T = size.T or x.shape[1]
    return resized(x, size.B, T) if x.dim() > 2 else resized(x, size.B * (size.T or 1))


def resized(x: Tensor | None, *first: int) -> Tensor | None:
    """A tensor like x whose first dimensions have these sizes, of which the first is outermost."""
    if x is None:
        return None
    outer = x.stride(1) * first[1] if len(first) > 1 else x.stride(0)
    shape, strides = (*first, *x.shape[len(first) :]), (outer, *x.stride()[1:])
    return x.new_empty_strided(shape, strides)


ENABLED = is_on("SLIPSTREAM_AHEAD")
# Seconds of a thread's turn with Python's lock, meanwhile. Python's own 5 ms come on top of each
# wait of the program for the GPU: on an H200 a forward of linear attention took 10.2 ms for 0.2.
TURN = 0.0005
# The arguments of a call, whose tensors are fake, in other sizes.
InOtherSizes = Callable[[tuple], Iterable[tuple]]


def begin(call: Callable[..., Any], args: Sequence[Any], at_sizes: InOtherSizes) -> None:
    """Has the kernels of call(*args) in other sizes compiled. args are on one device."""
    device = args[0].device
    if not ENABLED or not parallel_compile.is_possible():
        return
    if compiler_state(device) is None:
        return
    _BACKGROUND.put((call, tuple(map(_blank, args)), at_sizes, device))


def finish() -> None:
    """Waits for all that was begun."""
    _BACKGROUND.wait()


def _blank(x: Any, device: torch.device | str = "meta") -> Any:
    """A tensor like x without memory."""
    if not isinstance(x, Tensor):
        return x
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return like.requires_grad_(x.requires_grad)


class _Fakes(FakeTensorMode):
    """Tensors that begin at a multiple of 16 bytes; asked where, torch's own warn the user. Our
    operators within a call launch what they do on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "slipstream":
            key = getattr(torch._C.DispatchKey, args[0].device.type.upper())
            with self:
                return func._op_dk(key, *args, **(kwargs or {}))
        made = super().__torch_dispatch__(func, types, args, kwargs)
        for x in tree_leaves(made):
            if isinstance(x, FakeTensor):
                vars(x)["data_ptr"] = _at_zero
        return made


def _at_zero() -> int:
    return 0


def _leave_filters_alone() -> None:
    """Triton sets the process's warning filters while it reads a kernel's source, and then puts
    back those that were there, though the program's thread may have others by now. The warnings
    that this is about are of methods that its reader has no more."""
    from triton.compiler import code_generator

    module: Any = code_generator
    module.warnings = SimpleNamespace(
        warn=warnings.warn,
        warn_explicit=warnings.warn_explicit,
        catch_warnings=contextlib.nullcontext,
        simplefilter=lambda *_: None,
    )


@contextlib.contextmanager
def _brief_lock() -> Iterator[None]:
    """Shortens every thread's turn with Python's lock, for a block."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, TURN))
    ours = sys.getswitchinterval()
    try:
        yield
    finally:
        if sys.getswitchinterval() == ours:  # else the program has set another
            sys.setswitchinterval(before)


class _Background:
    """One thread that runs calls, and a few that compile for it."""

    def __init__(self) -> None:
        self._lock, self._done = threading.Lock(), threading.Condition()
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._left, self._ends = 0, False
        self._latest, self._awaited = 0.0, threading.Event()
        self.quiet = 1.0  # seconds without a first call before any of these is run

    def put(self, job: tuple) -> None:
        with self._lock, contextlib.suppress(RuntimeError):  # no more threads
            if self._thread is None or not self._thread.is_alive():  # also after a fork
                self._jobs, self._left = queue.SimpleQueue(), 0
                self._thread = threading.Thread(target=self._serve, daemon=True)
                self._thread.start()
                atexit.unregister(self._end)
                atexit.register(self._end)
            with self._done:
                self._left += 1
            self._latest = time.monotonic()
            self._jobs.put(job)

    def wait(self) -> None:
        self._awaited.set()
        with self._done:
            self._done.wait_for(lambda: self._left == 0)
        self._awaited.clear()

    def _end(self) -> None:
        """Before the interpreter ends, under which no thread may compile."""
        self._ends = True
        self._awaited.set()
        thread = self._thread
        if thread is not None and thread.is_alive():
            self._jobs.put(None)
            thread.join(parallel_compile.PATIENCE)

    def _wait_for_quiet(self) -> None:
        while (left := self._latest + self.quiet - time.monotonic()) > 0:
            if self._awaited.wait(left):
                return

    def _goes_on(self) -> bool:
        """Waits until no call waits for its kernels."""
        while not parallel_compile.idle.wait(1.0) and not self._ends:
            pass
        return not self._ends

    def _serve(self) -> None:
        backends._THREAD.bound = True  # what only compiles needs no CUDA context
        launch_cache.of_thread.ahead = True
        triton_cache_key.finish()
        _leave_filters_alone()
        # one processor in four compiles
        pool = _Threads(max(1, (os.cpu_count() or 1) // 4))
        while (job := self._jobs.get()) is not None and not self._ends:
            self._wait_for_quiet()
            with contextlib.suppress(Exception), _brief_lock():
                self._compile(pool, *job)
            with self._done:
                self._left -= 1
                self._done.notify_all()
        pool.close()

    def _compile(
        self, pool: Any, call: Callable[..., Any], args: tuple, at_sizes: InOtherSizes, device: Any
    ) -> None:
        ready: Future = Future()
        ready.set_result(None)
        fake = _Fakes(allow_non_fake_inputs=True)
        wanted = [isinstance(x, Tensor) and x.requires_grad for x in args]
        with parallel_compile.only_compiling(pool, ready, self._goes_on), torch.no_grad(), fake:
            for other in at_sizes(tuple(_blank(x, device) for x in args)):
                if not self._goes_on():
                    return
                with contextlib.suppress(Exception):
                    call(*map(_with_gradient, other, wanted))


def _with_gradient(x: Any, wanted: bool) -> Any:
    """What sizes are of wants no gradient, where the call's own argument does."""
    return x.requires_grad_() if wanted and isinstance(x, Tensor) else x


_BACKGROUND = _Background()


class _Threads:
    """An executor whose threads do not keep the interpreter from ending."""

    def __init__(self, count: int) -> None:
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future:
        future: Future = Future()
        self._calls.put((future, call, args))
        return future

    def _serve(self) -> None:
        while (task := self._calls.get()) is not None:
            future, call, args = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*args))
                except BaseException as error:
                    future.set_exception(error)

    def close(self) -> None:
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()
