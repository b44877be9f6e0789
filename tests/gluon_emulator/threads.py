"""Runs Gluon kernels without a GPU: numpy for tensors, a thread for each partition.

Products are made as late as their waits allow, and TMA copies as early as they are issued, so a
buffer that is freed too early, a barrier of the wrong phase or a missing wait shows as a wrong
number, an error or a wait that does not end. What is not ordered is an error however the threads
ran (tests/gluon_emulator/race_detector.py). Layouts, registers and rounding are not there.

    with emulated():
        from slipstream.kernels.attention.sm90 import forward
"""

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

import slipstream as slipstream  # before its Triton is replaced
from tests.gluon_emulator import race_detector
from tests.gluon_emulator.buffer import _LOCAL, Buffer
from tests.gluon_emulator.values import Constexpr, Descriptor, Pointer, Tensor, tensor
from tests.support.by_shape import product
from tests.support.processes import run_all

# a wait that all others wait for too is found at once: this is for one that turns for ever, and far
# above what a busy machine takes
_WAIT = 180.0
_SLOTS = threading.Lock()


class Partitions:
    """Those of a program that run beside each other: how many have not ended, what the waiting
    ones wait for, and what went wrong."""

    def __init__(self, left: int) -> None:
        self.changed = threading.Condition()
        self.left = left
        self.awaited: list[Callable[[], bool]] = []
        self.errors: list[BaseException] = []

    def wait(self, met: Callable[[], bool]) -> None:
        """Within `changed`."""
        self.awaited.append(met)
        self._find_deadlock()
        self.changed.wait_for(lambda: met() or self.errors, _WAIT)
        self.awaited.remove(met)
        if not met():
            raise TimeoutError("a barrier waits for ever")

    def end(self, *errors: BaseException) -> None:
        with self.changed:
            self.left -= 1
            self.errors += errors
            self._find_deadlock()

    def _find_deadlock(self) -> None:
        if self.left == len(self.awaited) > 0 and not any(met() for met in self.awaited):
            self.errors.append(TimeoutError("all partitions wait for each other"))
        if self.errors:
            self.changed.notify_all()


class Barrier:
    def __init__(self) -> None:
        self.count = self.arrived = self.phase = self.missing = 0
        self.ended, self.order = False, race_detector.Bar()

    def begin(self, count: int) -> None:
        self.count = count

    def end(self) -> None:
        assert not self.arrived and not self.missing, "a barrier is invalidated too early"
        self.ended = True

    def arrive(self, arrivals: int = 1, missing: int = 0) -> None:
        with _LOCAL.partitions.changed:
            assert not self.ended, "a barrier is used that was invalidated"
            if arrivals:
                _LOCAL.part.arrives(self.order)
            self.arrived += arrivals
            self.missing += missing
            assert self.arrived <= self.count and self.missing >= 0
            if self.arrived == self.count and not self.missing:
                self.arrived, self.phase = 0, self.phase + 1
                self.order.ends_phase()
                _LOCAL.partitions.changed.notify_all()

    def wait(self, parity: Any) -> None:
        with _LOCAL.partitions.changed:
            assert not self.ended, "a barrier is used that was invalidated"
            _LOCAL.partitions.wait(lambda: self.phase & 1 != int(parity))
            _LOCAL.part.met(self.order)
            copies = _LOCAL.part.program.copies
            if copies.get(self, self.phase) < self.phase:
                del copies[self]


class Product:
    """Under way: its operands in shared memory are read when it is waited for. Anything else that
    is done with it is an error, since it is no tensor."""

    type = SimpleNamespace(layout=None)

    def __init__(self, a: Any, b: Buffer, acc: Any) -> None:
        self.a, self.b, self.acc, self.done = a, b, acc, None
        part = _LOCAL.part
        part.begins(part.products, *(x.data for x in (a, b) if isinstance(x, Buffer)))
        _LOCAL.queue.append(self)

    def finish(self) -> None:
        a = self.a.data if isinstance(self.a, Buffer) else self.a
        acc = self.acc.done if isinstance(self.acc, Product) else self.acc
        self.done = tensor(product(np.asarray(a), self.b.data) + np.asarray(acc))


def _mma(a: Any, b: Buffer, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    return Product(a, b, acc if use_acc else acc * 0.0)


def _mma_wait(left: int, deps: tuple) -> Any:
    while len(_LOCAL.queue) > left:
        _LOCAL.queue.pop(0).finish()
    _LOCAL.part.waits(_LOCAL.part.products, left)
    # one that is still under way can only be what the next product adds to
    found = tuple(x.done if isinstance(x, Product) and x.done is not None else x for x in deps)
    return found[0] if len(found) == 1 else found


def _mma_now(a: Any, b: Any, acc: Any) -> Tensor:
    return tensor(product(np.asarray(a), np.asarray(b)) + np.asarray(acc))


def _copy_in(desc: Descriptor, at: list, barrier: Barrier, buffer: Buffer) -> None:
    assert buffer.shape == desc.block
    _LOCAL.part.copies_in(barrier.order, buffer.data)
    buffer.data[...] = 0.0
    _LOCAL.part.program.copies[barrier] = barrier.phase
    part = desc.part(at)
    buffer.data[tuple(slice(0, n) for n in part.shape)] = part
    barrier.arrive(0, -desc.block_type.nbytes)


def later(finish: Callable[[], None], buffer: Buffer) -> None:
    """A store under way: it reads its buffer when it is waited for."""
    _LOCAL.part.begins(_LOCAL.part.copies, buffer.data)
    _LOCAL.stores.append(finish)


def _copy_out(desc: Descriptor, at: list, buffer: Buffer) -> None:
    def finish() -> None:
        desc.part(at)[...] = buffer.data

    later(finish, buffer)


def _tma_reduce_add(desc: Descriptor, at: list, buffer: Buffer) -> None:
    def finish() -> None:
        part = desc.part(at)
        assert not np.isnan(part).any()
        part += buffer.data

    later(finish, buffer)


def _store_wait(left: int = 0) -> None:
    while len(_LOCAL.stores) > left:
        _LOCAL.stores.pop(0)()
    _LOCAL.part.waits(_LOCAL.part.copies, left)


class AsyncCopies:
    """cp.async: places have no numbers from the copy's issue to the wait for its group."""

    def __init__(self) -> None:
        self.open: list[Callable[[], None]] = []
        self.groups: list[list[Callable[[], None]]] = []

    def async_copy_global_to_shared(self, buffer: Buffer, p: Pointer, mask: Any = True) -> None:
        found = _load(p, mask)
        assert buffer.shape == found.shape
        buffer.data[...] = np.nan
        self.open.append(lambda: buffer.store(found))

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, left: int = 0) -> None:
        while len(self.groups) > left:
            for finish in self.groups.pop(0):
                finish()


def _fence() -> None:
    _LOCAL.part.fences()


def _semaphore_release(p: Pointer, value: Any) -> None:
    _store_wait()
    _store(p, value)


def _semaphore_acquire(p: Pointer) -> Any:
    time.sleep(1e-4)
    if _LOCAL.partitions.errors:
        raise TimeoutError("a turn does not come")
    return tensor(p.data[p.at])


def _lock_workspace(p: Pointer, first: Any, count: Any) -> Any:
    end = time.monotonic() + _WAIT
    while time.monotonic() < end:
        with _SLOTS:
            order = [(int(first) + i) % int(count) for i in range(int(count))]
            free = [i for i in order if p.data[int(p.at) + i] == 0]
            if free:
                p.data[int(p.at) + free[0]] = 1
                return tensor(free[0])
        time.sleep(1e-3)
    raise AssertionError("waits for a slot for ever")


def _unlock_workspace(p: Pointer) -> None:
    assert p.data[int(p.at)] == 1
    p.data[int(p.at)] = 0


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Buffer:
    if dtype == "int64":
        made = np.empty(shape, dtype=object)
        made[...] = [[Barrier() for _ in range(shape[1])] for _ in range(shape[0])]
        return Buffer(made)
    return Buffer(np.full(shape, -1) if dtype == "int32" else np.full(shape, np.nan))


def _load(p: Pointer, mask: Any = True, other: float = 0.0, cache_modifier: str = "") -> Tensor:
    at, mask = np.broadcast_arrays(p.at, mask)
    assert not mask.any() or (at[mask].min() >= 0 and at[mask].max() < p.data.size)
    found = np.where(mask, p.data[np.where(mask, at, 0)], other)
    return tensor(found.astype(p.data.dtype))


def _store(p: Pointer, values: Any, mask: Any = True) -> None:
    at, values, mask = np.broadcast_arrays(p.at, values, mask)
    assert not mask.any() or (at[mask].min() >= 0 and at[mask].max() < p.data.size)
    p.data[at[mask]] = values[mask]


def _atomic_add(p: Pointer, value: Any, sem: str = "acq_rel") -> Tensor:
    before = tensor(p.data[int(p.at)].copy())
    p.data[int(p.at)] += value
    return before


def _specialize(parts: list, warps: list, registers: list) -> None:
    partitions = Partitions(len(parts))
    where, whole = _LOCAL.program, _LOCAL.part
    orders = [whole.child(f"{fn.__name__} {n}") for n, (fn, _) in enumerate(parts)]

    def run(order: race_detector.Part, fn: Any, args: tuple) -> None:
        _LOCAL.program, _LOCAL.queue, _LOCAL.stores = where, [], []
        _LOCAL.part, _LOCAL.partitions = order, partitions
        try:
            with np.errstate(all="ignore"):
                fn(*args)
                assert not _LOCAL.stores, "a part ends before its stores have read"
        except BaseException as e:
            partitions.end(e)
        else:
            partitions.end()

    threads = [
        threading.Thread(target=run, args=(order, *part), daemon=True)
        for order, part in zip(orders, parts, strict=True)
    ]
    run_all(threads)
    if errors := partitions.errors:
        raise next((e for e in errors if isinstance(e, race_detector.Race)), errors[0])
    for order in orders:
        whole.joins(order)


def _jit(fn: Any = None, **options: Any) -> Any:
    return fn if fn is not None else lambda fn: fn


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _asm(asm: str, constraints: str, x: list, **options: Any) -> Tensor:
    """x rounded, 1 / x or the program's number. Else, by the number of operands: 2^x; a product;
    x[0] where x[1] < x[2]; x[0] where x[1] is one of the x[3] numbers from x[2] on. -inf elsewhere.
    """
    if "%ctaid" in asm:
        return tensor(_LOCAL.program[0])
    if asm.startswith("prefetch"):  # of places that there are
        assert x[0].at.min() >= 0 and x[0].at.max() < x[0].data.size
        return tensor(0)
    if asm.startswith("cvt"):
        return x[0].to(options["dtype"])
    if asm.startswith("rcp"):
        return tensor(1.0 / x[0])
    if len(x) == 3:
        return tensor(np.where(x[1] < x[2], x[0], -np.inf))
    if len(x) == 4:
        x[1:] = [np.asarray(i) for i in x[1:]]
        return tensor(np.where(np.mod(x[1] - x[2], 2**32) < np.mod(x[3], 2**32), x[0], -np.inf))
    return tensor(x[0] * x[1] if len(x) == 2 else np.exp2(x[0]))


def _language() -> SimpleNamespace:
    return SimpleNamespace(
        constexpr=Constexpr,
        constexpr_function=_jit,
        int32="int32", int64="int64", float32="float32",
        program_id=lambda axis: tensor(0 if axis else _LOCAL.program[0]),  # grids have one axis
        num_warps=lambda: 4,
        num_programs=lambda axis: tensor(1 if axis else _LOCAL.program[1]),
        arange=lambda a, b, layout=None: tensor(np.arange(a, b)),
        full=lambda shape, x, dtype, layout=None: tensor(np.full(shape, x)),
        zeros=lambda shape, dtype, layout=None: tensor(np.zeros(shape)),
        where=lambda c, x, y: (
            (x if c else y) if isinstance(x, Pointer) else tensor(np.where(c, x, y))
        ),
        # of a NaN and a number the number, as a GPU has it
        minimum=lambda x, y: tensor(np.fmin(x, y)),
        maximum=lambda x, y: tensor(np.fmax(x, y)),
        max=lambda x, axis=None: tensor(np.fmax.reduce(x, axis)),
        sum=lambda x, axis: tensor(np.sum(x, axis)),
        exp2=lambda x: tensor(np.exp2(x)),
        fma=lambda x, y, z: tensor(np.asarray(x) * np.asarray(y) + np.asarray(z)),
        exp=lambda x: tensor(np.exp(x)),
        rsqrt=lambda x: tensor(1.0 / np.sqrt(x)),
        reduce=lambda xs, axis, add: tuple(tensor(np.sum(x, axis)) for x in xs),
        floor=lambda x: tensor(np.floor(x)),
        log2=lambda x: tensor(np.log2(x)),
        abs=lambda x: tensor(np.abs(x)),
        cdiv=lambda x, y: tensor(np.asarray(x) + y - 1) // y,
        convert_layout=lambda x, layout, assert_trivial=False: x,
        load=_load, store=_store, atomic_add=_atomic_add, static_range=range,
        allocate_shared_memory=_allocate, warp_specialize=_specialize,
        NVMMADistributedLayout=_nothing, DotOperandLayout=_nothing, SliceLayout=_nothing,
        BlockedLayout=_nothing, SwizzledSharedLayout=_nothing,
        inline_asm_elementwise=_asm,
        thread_barrier=_nothing,
        broadcast=lambda x, y: tuple(map(tensor, np.broadcast_arrays(x, y))),
        reshape=lambda x, shape: tensor(np.reshape(x, shape)),
        permute=lambda x, order: tensor(np.transpose(x, order)),
        split=lambda x: (x[..., 0], x[..., 1]),
        join=lambda x, y: tensor(np.stack((x, y), -1)),
        NVMMASharedLayout=SimpleNamespace(get_default_for=_nothing),
        nvidia=SimpleNamespace(hopper=SimpleNamespace(mma_v2=_mma_now)),
        expand_dims=lambda x, axis: tensor(np.expand_dims(x, axis)),
    )  # fmt: skip


def _mbarrier() -> SimpleNamespace:
    def arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
        for _ in range(count if pred else 0):
            barrier.arrive()

    return SimpleNamespace(
        MBarrierLayout=_nothing,
        init=lambda barrier, count: barrier.begin(count),
        expect=lambda barrier, size: barrier.arrive(1, size),
        arrive=arrive,
        wait=lambda barrier, parity: barrier.wait(parity),
        invalidate=lambda barrier: barrier.end(),
    )


def _is_tritons(x: Any) -> bool:
    """Whether x is a part of Triton, or an object of one of its classes, such as a kernel."""
    name = x.__name__ if isinstance(x, ModuleType) else type(x).__module__
    return name.partition(".")[0] == "triton"


def _has_kernels(name: str) -> bool:
    """Whether a module of kernels was imported for Triton's compiler."""
    if not name.startswith("slipstream.kernels."):
        return False
    values = [*vars(sys.modules[name]).values()]
    # launches may name the module of their kernels instead of these, packages hold all of theirs
    for x in [] if hasattr(sys.modules[name], "__path__") else values[:]:
        if isinstance(x, ModuleType) and x.__name__.startswith("slipstream.kernels."):
            values += vars(x).values()
    return any(map(_is_tritons, values))


def _replace(modules: dict[str, ModuleType | None]) -> None:
    """Other modules under these names, or none, where `import` and `from package` look."""
    for name, module in modules.items():
        before = sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
        package, _, child = name.rpartition(".")
        within = sys.modules.get(package)
        if within is not None and vars(within).get(child) is before:
            vars(within)[child] = module
            if module is None:
                del vars(within)[child]


@contextmanager
def emulated() -> Iterator[None]:
    """Within, kernels are imported as functions for `launch`, whatever was imported before."""
    gl = _language()
    # of the launches that stand beside kernels
    for name in ("float16", "bfloat16", "float8e4nv", "float8e5"):
        vars(gl).setdefault(name, name)
    names = {
        "gl": gl,
        "gluon": SimpleNamespace(jit=_jit, constexpr_function=_jit), "mbarrier": _mbarrier(),
        "copy_in": _copy_in, "copy_out": _copy_out, "store_wait": _store_wait,
        "fence_async_shared": _fence, "LARGER_VIEWS": True, "TensorDescriptor": None,
        "threads_together": _nothing, "uniform": lambda n: n, "warpgroup_mma": _mma,
        "warpgroup_mma_wait": _mma_wait,
    }  # fmt: skip
    triton, language, sm90 = ModuleType("triton"), ModuleType("triton.language"), ModuleType("h")
    semaphore = ModuleType("semaphore")
    vars(semaphore).update(
        tma_reduce_add=_tma_reduce_add, semaphore_acquire=_semaphore_acquire,
        semaphore_release=_semaphore_release,
        wait_bulk_stores=_store_wait, proxy_fence=_nothing, lock_workspace=_lock_workspace,
        unlock_workspace=_unlock_workspace,
    )  # fmt: skip
    ampere = ModuleType("ampere")
    vars(ampere).update(async_copy=AsyncCopies())
    vars(language).update(vars(gl))
    vars(triton).update(jit=_jit, language=language)
    vars(sm90).update(names)
    fake = {
        "triton": triton,
        "triton.language": language,
        "triton.experimental.gluon.language.nvidia.ampere": ampere,
        "slipstream.kernels.primitives.sm90": sm90,
    }
    fake["slipstream.kernels.primitives.semaphore"] = semaphore
    kept = dict(sys.modules)
    try:
        _replace(dict.fromkeys(filter(_has_kernels, kept)) | fake)
        yield
    finally:
        made = {n: kept.get(n) for n, x in sys.modules.items() if kept.get(n) is not x}
        _replace(made | {n: x for n, x in kept.items() if n not in sys.modules})


def kernel(path: str) -> Any:
    """The kernel at "module:name"."""
    with emulated():
        module, _, name = path.partition(":")
        return getattr(importlib.import_module(module), name)


def launch(kernel: Any, programs: int, args: tuple, **constants: Any) -> None:
    """Programs one after another; integers become tensors."""
    for i in range(programs):
        _run(i, programs, kernel, args, constants)


def launch_together(kernel: Any, programs: int, args: tuple, **constants: Any) -> None:
    """Programs that wait for one another."""
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            _run(i, programs, kernel, args, constants)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(programs)]
    run_all(threads, 3 * _WAIT)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "programs wait for ever"


def _run(i: int, programs: int, kernel: Any, args: tuple, constants: dict) -> None:
    _LOCAL.program, _LOCAL.queue, _LOCAL.stores = (i, programs), [], []
    _LOCAL.partitions = Partitions(1)
    _LOCAL.part = race_detector.Part(race_detector.Program(), "the program")
    with np.errstate(all="ignore"):  # as of parts
        kernel(*(tensor(x) if isinstance(x, int | float) else x for x in args), **constants)
    assert not _LOCAL.stores, "a program ends before its stores have read"
    assert not _LOCAL.part.program.copies, "a program ends before its copies have come"
