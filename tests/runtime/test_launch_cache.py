"""Launches that do not ask Triton again: the kernel must be the one that Triton would take."""

import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from slipstream.runtime import call_replay, compilations, launch_cache, parallel_compile, token_ids
from slipstream.runtime.backends import HAVE_TRITON
from slipstream.runtime.call_recorder import CallRecorder
from slipstream.runtime.launch_cache import CachedKernel, FusedKernel, cached, of_thread
from slipstream.runtime.symbolic_sizes import Size
from tests.support import wants

if HAVE_TRITON:
    import triton
    import triton.language as tl
    from triton import knobs
    from triton.compiler import ASTSource
    from triton.runtime import _async_compile, driver

    from slipstream.compiler import aot
    from tests.support.absent_gpu import STREAM, AbsentGPU

    @triton.jit(do_not_specialize=["n"])
    def toy_kernel(x_ptr, y_ptr, z_ptr, scale, n, stride, W: tl.constexpr, FLAG: tl.constexpr):
        o = tl.arange(0, W)
        b_x = tl.load(x_ptr + o * stride, mask=o < n, other=0.0)
        if z_ptr is not None:
            b_x += tl.load(z_ptr + o, mask=o < n, other=0.0)
        tl.store(y_ptr + o, b_x * scale if FLAG else b_x, mask=o < n)

    @triton.jit
    def defaults_kernel(x_ptr, W: tl.constexpr, n=5, FLAG: tl.constexpr = False, y_ptr=None):
        o = tl.arange(0, W)
        b_x = tl.load(x_ptr + o, mask=o < n)
        tl.store(x_ptr + o if y_ptr is None else y_ptr + o, b_x + FLAG, mask=o < n)


pytestmark = wants.compiler


class Launcher:
    """Instead of a launch: the kernel and its arguments, but for constexprs, are written down."""

    launches: ClassVar[list[tuple]] = []

    def __init__(self, src: Any, metadata: Any) -> None:
        self.given = [i for i, kind in enumerate(src.signature.values()) if kind != "constexpr"]

    def __call__(self, *args: Any) -> None:
        *grid, stream, function, _, metadata, enter, _ = args[:9]
        assert stream == STREAM
        if enter is not None:
            enter(metadata)
        given = [args[9 + i] for i in self.given]
        given = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in given]
        self.launches.append((*grid, function, given))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple]]:
    """The launches on it."""

    made = AbsentGPU(Launcher, load_binary=lambda name, kernel, *_: (object(), kernel, 1, 0, 1024))
    monkeypatch.setattr(driver, "_active", made)
    for kernel in (toy_kernel, defaults_kernel):
        kernel.device_caches.clear()
    Launcher.launches.clear()
    yield Launcher.launches
    for kernel in (toy_kernel, defaults_kernel):
        kernel.device_caches.clear()


def arguments(rng: random.Random) -> tuple[tuple, dict]:
    base = torch.zeros(256, dtype=rng.choice([torch.float32, torch.bfloat16]))
    at = rng.choice([0, 0, 0, 1, 8])
    x = base[at : at + 64]
    z = rng.choice([None, x, torch.zeros(64), torch.nn.Parameter(torch.zeros(64))])
    n = rng.choice([1, 16, 17, 32, 1 << 31, 1 << 40])
    stride = rng.choice([1, 2, 16, 48, 0, -16, 1 << 31, 1 << 40])
    args = (x, torch.zeros(64), z, rng.choice([1.0, 0.5, 2, 16, 1]), n, stride)
    named: dict[str, Any] = {"W": rng.choice([16, 32]), "FLAG": rng.choice([True, False])}
    if rng.random() < 0.5:
        args += tuple(named.values())
        named = {}
    return args, named | {"num_warps": rng.choice([1, 2])}


def test_same_key_is_same_kernel(gpu: list[tuple]) -> None:
    rng, same, told = random.Random(0), {}, 0
    keys: list[str] = []

    def note(*, key: str, **_: Any) -> bool:
        keys.append(key)
        return True  # not compiled

    with mock.patch.object(knobs.runtime, "jit_cache_hook", note):
        for _ in range(4000):
            args, named = arguments(rng)
            FusedKernel(toy_kernel)[(1,)](*args, **named)
            key = CachedKernel(toy_kernel).key_of(args, named)
            told += key is not None
            assert key is None or same.setdefault(key, keys[-1]) == keys[-1]
    assert told > 400 and len(set(same.values())) > 50


def test_sizes_of_a_record_are_numbers(gpu: list[tuple]) -> None:
    """Of a kernel that is probed within a call that is recorded, in a thread of its own."""
    args = torch.zeros(64), torch.zeros(64), None, 0.5
    recorder = CallRecorder([torch.zeros(5), 5, 32, 2])
    _, n, width, warps = recorder.args
    assert type(n) is Size
    options = {"FLAG": True, "num_warps": warps}
    cases: Any = ((5, 32, {"FLAG": True, "num_warps": 2}), (n, width, options))
    for size, wide, kind in cases:
        CachedKernel(toy_kernel)[2, size](*args, size, 1, W=wide, **kind)
    assert gpu[0] == gpu[1] and type(gpu[1][1]) is int


def test_launches_what_triton_would(gpu: list[tuple]) -> None:
    remembering, asked = CachedKernel(toy_kernel), 0
    x, y = torch.zeros(64), torch.zeros(65)
    choices = itertools.product([x, x.half()], [None, y, y[1:]], [5, 1 << 33], [1, 16, 3])
    cases = [((a, y[:64], z, 0.5, n, s), {"W": 32, "FLAG": True}) for a, z, n, s in choices]
    rng = random.Random(1)
    for args, named in (rng.choice(cases) for _ in range(150)):
        FusedKernel(toy_kernel)[2, 3](*args, **named)
        with mock.patch.object(toy_kernel, "run", wraps=toy_kernel.run) as run:
            remembering[2, 3](*args, **named)
            asked += run.called
        assert gpu[-1] == gpu[-2]
        assert gpu[-1][:3] == (2, 3, 1)
    assert asked < 120


def test_profiler_sees_every_launch(gpu: list[tuple]) -> None:
    args, named = (torch.zeros(64), torch.zeros(64), None, 0.5, 5, 1), {"W": 32, "FLAG": True}
    remembering, seen = CachedKernel(toy_kernel), []
    for _ in range(2):
        remembering[1,](*args, **named)
    launched, hook = Launcher.__call__, mock.Mock()

    def with_hook(self: Launcher, *args: Any) -> None:
        seen.append(args[6].get()["name"])
        launched(self, *args)

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        with mock.patch.object(Launcher, "__call__", with_hook):
            remembering[1,](*args, **named)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["toy_kernel"] and len(gpu) == 3


def test_launches_again_what_was_launched(gpu: list[tuple]) -> None:
    def call(x: torch.Tensor, z: torch.Tensor | None, n: int) -> torch.Tensor:
        y, part = torch.empty_like(x), x.new_empty(2, 64)
        remembering[2, 3](x, part[1], z, 0.5, n, 1, W=32, FLAG=True)
        remembering[1,](part.view(-1)[64:], y, x, 2.0, n, 16, 16, False)
        return y

    def places(given: list, known: dict[int, str]) -> list:
        return [[known.get(x, "made") if isinstance(x, int) and x > 99 else x for x in given]]

    remembering = CachedKernel(toy_kernel)
    for z in (None, torch.zeros(64)):
        x = torch.zeros(64)
        call(x, z, 5)
        record = call_replay.record(call, (x, z, 5))[1]
        assert record is not None
        x, z = torch.zeros(64), None if z is None else torch.zeros(64)
        known = {x.data_ptr(): "x"} | ({} if z is None else {z.data_ptr(): "z"})
        gpu.clear()
        record.play((x, z, 5))
        call(x, z, 5)
        played, called = gpu[:2], gpu[2:]
        for a, b in zip(played, called, strict=True):
            assert a[:4] == b[:4] and places(a[4], known) == places(b[4], known)
        assert played[0][4][1] == played[1][4][0]


def test_launch_batch_is_one_call(gpu: list[tuple]) -> None:
    """The stream is asked for once, and a record knows that a profiler looks."""

    def call(x: torch.Tensor) -> torch.Tensor:
        y, z = torch.empty_like(x), torch.empty_like(x)
        remembering[1,](x, y, None, 2, 5, 1, W=32, FLAG=True)
        remembering[1,](y, z, x, 2.0, 5, 1, W=32, FLAG=True)
        remembering[2,](z, y, x, 2, 5, 1, W=32, FLAG=True)
        return y

    remembering, x = CachedKernel(toy_kernel), torch.zeros(64)
    with mock.patch.object(AbsentGPU, "get_current_stream", return_value=STREAM) as asked:
        call(x)
        record = call_replay.record(call, (x,))[1]
        assert record is not None
        asked.reset_mock()
        gpu.clear()
        record.play((x,))
        assert asked.call_count == 1 and len(gpu) == 3
    # of scalars that are equal each launch has its own
    assert [type(given[3]) for *_, given in gpu[:3]] == [int, float, int]
    assert not record.is_profiled()
    hook = mock.Mock()
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert record.is_profiled()  # then the call runs as it is
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)


def width_of(src: Any) -> int:
    return next(x for x in src.constants.values() if x in (16, 32, 64, 128))


def test_kernels_are_compiled_before_they_are_launched(gpu: list[tuple]) -> None:
    def call(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        for width in (16, 32):
            remembering[1,](x, y, None, 0.5, 5, 1, W=width, FLAG=True)
        state += 1
        return y.zero_()

    remembering, state = CachedKernel(toy_kernel), torch.zeros(2)
    with mock.patch.object(driver.active, "launcher_cls", mock.Mock()) as launcher:
        parallel_compile.compile_kernels(call, (torch.zeros(64), state))
    # made in the same threads, of a kernel that compiles beside it or after it
    assert {width_of(x.args[0]) for x in launcher.call_args_list} == {16, 32}
    assert not gpu and not state.any()
    with mock.patch.object(toy_kernel, "compile", None):
        call(torch.zeros(64), state)
    assert len(gpu) == 2 and state.all()


def test_nothing_is_compiled_ahead_on_amd(gpu: list[tuple], monkeypatch: Any) -> None:
    """Launches are Triton's there: each would wait for a kernel that is compiled after all."""

    def call(x: torch.Tensor) -> None:
        calls.append(_async_compile.active_mode.get())
        assert calls == [None]
        FusedKernel(toy_kernel)[1,](x, x, None, 0.5, 5, 1, W=32, FLAG=True)

    monkeypatch.setattr(torch.version, "hip", "6.4")
    calls, x = [], torch.zeros(64)
    parallel_compile.compile_kernels(call, (x,))
    assert not calls and not gpu
    call(x)
    assert len(gpu) == 1


def test_sources_are_read_in_order(gpu: list[tuple]) -> None:
    def call(x: torch.Tensor) -> None:
        for width in (16, 32, 64, 128):
            remembering[1,](x, x, None, 0.5, 5, 1, W=width, FLAG=True)

    def read(src: Any, *args: Any) -> Any:
        width = width_of(src)
        steps.append(("begins", width))
        time.sleep(0.02)
        try:
            if width == 16:
                raise ValueError("a kernel that does not compile")
            return make_ir(src, *args)
        finally:
            steps.append(("ends", width))

    remembering, steps, make_ir = CachedKernel(toy_kernel), [], ASTSource.make_ir
    with (
        mock.patch.object(ASTSource, "make_ir", read),
        mock.patch.object(driver.active, "launcher_cls", mock.Mock()) as launcher,
        tempfile.TemporaryDirectory() as folder,
        knobs.cache.scope(),
    ):
        knobs.cache.dir = folder
        parallel_compile.compile_kernels(call, (torch.zeros(64),))
    assert steps == [(step, w) for w in (16, 32, 64, 128) for step in ("begins", "ends")]
    # of a kernel that compiles, beside it or after it
    assert {width_of(x.args[0]) for x in launcher.call_args_list} == {32, 64, 128}
    assert of_thread.warmup is None


def test_unchecked_indices_are_checked_later(gpu: list[tuple]) -> None:
    offsets, looked_at = torch.tensor([0, 5, 9]), []

    def call(offsets: torch.Tensor) -> None:
        for _ in range(2):
            looked_at.append(token_ids._looked_at("cu_seqlens", offsets, 9))

    parallel_compile.compile_kernels(call, (offsets,))
    call(offsets)
    assert looked_at == [False, False, False, True]


def test_takes_only_kernels_of_the_jit() -> None:
    assert isinstance(cached(toy_kernel), CachedKernel) and cached(toy_kernel) is cached(toy_kernel)
    stub = mock.Mock()
    assert cached(stub) is stub
    with mock.patch.object(torch.version, "hip", "6.4"):
        assert type(cached(triton.jit(toy_kernel.fn))) is FusedKernel
    assert type(cached(toy_kernel)) is CachedKernel


def test_launch_says_that_products_are_fused(gpu: list[tuple], monkeypatch: Any) -> None:
    """Triton 3.9 warns where a launch does not, and 3.10 takes the other choice then."""
    given: list[dict] = []
    monkeypatch.setattr(triton.JITFunction, "run", lambda self, *_, **named: given.append(named))
    arguments = (torch.zeros(64), torch.zeros(64), None, 1.0, 16, 1, 32, True)
    launch = CachedKernel(toy_kernel)[1,]
    launch(*arguments)
    launch(*arguments, enable_fp_fusion=False)
    monkeypatch.setattr(of_thread, "warmup", done := Future())
    done.set_result(None)
    launch(*arguments)
    assert [x["enable_fp_fusion"] for x in given] == [True, False, True]
    on_hip = FusedKernel(toy_kernel)[1,]
    on_hip(*arguments)
    on_hip(*arguments, enable_fp_fusion=False)
    assert [x["enable_fp_fusion"] for x in given[3:]] == [True, False]
    monkeypatch.setattr(aot, "_release", lambda: (3, 9))
    launch(*arguments)
    assert given[-1].items() >= (aot.FUSION | aot.REGISTERS).items()


# of a launch, which are no arguments of the kernel
OPTIONS = {"enable_fp_fusion", "num_warps", "num_stages", "maxnreg", "launch_pdl", "sched4reg"}


def test_compilations_count_variants(gpu: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    cached_kernel, x = CachedKernel(toy_kernel), torch.zeros(64)
    monkeypatch.setattr(launch_cache, "_CACHED", {id(toy_kernel): cached_kernel})
    toy_kernel.device_caches.clear()
    seen = []
    for step in (3, 7, 16, 32, 3):  # of an integer a multiple of 16 is a variant of its own
        cached_kernel[1,](x, x, None, 0.5, 5, step, W=32, FLAG=True)
        seen.append(compilations())
    assert seen == [1, 1, 2, 2, 2]


def test_arguments_left_out_are_defaults(gpu: list[tuple]) -> None:
    x, y, asked = torch.zeros(64), torch.zeros(64), []

    def call(x: torch.Tensor, y: torch.Tensor) -> None:
        remembering[1,](x, W=32)
        remembering[1,](x, W=32, y_ptr=y)

    remembering = CachedKernel(defaults_kernel)
    for W, n, given in ((32, 5, {}), (16, 7, {"n": 7}), (16, 7, {"n": 7, "FLAG": True})):
        for launch in (defaults_kernel, remembering, remembering):
            with mock.patch.object(defaults_kernel, "run", wraps=defaults_kernel.run) as run:
                launch[1,](x, W=W, enable_fp_fusion=True, **given)
                asked.append(run.called)
        assert gpu[-1] == gpu[-2] == gpu[-3] and gpu[-1][4] == [x.data_ptr(), n]
    assert asked == [True, True, False] * 3
    call(x, y)
    record = call_replay.record(call, (x, y))[1]
    assert record is not None
    gpu.clear()
    record.play((y, x))
    assert [launch[4] for launch in gpu] == [[y.data_ptr(), 5], [y.data_ptr(), 5, x.data_ptr()]]


def test_every_launch_can_be_kept() -> None:
    """Each argument is one of the kernel's, by place, by name or by default; the rest are
    options."""
    from slipstream.compiler.trace import PlainTorch, trace
    from slipstream.tools.catalog import SAMPLES

    by_name, seen = set(), set()

    def look(self: CachedKernel, grid: tuple) -> Any:
        def run(*args: Any, **named: Any) -> None:
            name = self.kernel.fn.__name__
            seen.add(name)
            args, named = self.in_order(args, named)
            if len(args) < len(self.kernel.params) or {*named} - OPTIONS:
                by_name.add(name)
            FusedKernel(self.kernel)[grid](*args, **named)

        return run

    with mock.patch.object(CachedKernel, "__getitem__", look):
        for sample, impl in itertools.product(SAMPLES, ("triton", "sm90")):
            call = partial(_call, sample, impl)
            with suppress(PlainTorch, ValueError, NotImplementedError):
                trace(call, "sm_90")  # of some there is no such implementation
    assert len(seen) > 35 and not by_name


def _call(sample: Any, impl: str, device: torch.device) -> Any:
    from slipstream.tools.catalog import REPRESENTATIVE

    return sample.call(sample.inputs(REPRESENTATIVE[0], device), impl)
