"""The C function that launches gets the same arguments from a cached or replayed launch as from
Triton's own."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.runtime import call_replay
from slipstream.runtime.backends import HAVE_TRITON
from slipstream.runtime.launch_cache import CachedKernel, FusedKernel
from tests.support import wants

pytestmark = wants.compiler

if HAVE_TRITON:
    import triton
    import triton.language as tl
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver
    from triton.tools.tensor_descriptor import TensorDescriptor

    from tests.support.absent_gpu import AbsentGPU

    @triton.jit
    def plain_kernel(x_ptr, y_ptr, z_ptr, scale, n, W: tl.constexpr):
        o = tl.arange(0, W)
        tl.store(y_ptr + o, tl.load(x_ptr + o, mask=o < n) * scale, mask=o < n)

    @triton.jit
    def tiles_kernel(x, y_ptr, y, n, W: tl.constexpr):
        b = x.load([0, n])
        y.store([0, 0], b)
        tl.store(y_ptr + tl.arange(0, W), n)


class CFunction:
    """In place of the one that launches; it has no closure, where launch_cache.py looks."""

    def __init__(self, launches: list[tuple]) -> None:
        self.launches = launches

    def __call__(self, *args: Any) -> None:
        self.launches.append(tuple(map(_plain, args)))
        of_launch = {type(x).__name__: x for x in reversed(args)}  # of two hooks the first
        if "HookChain" in of_launch:
            of_launch["HookChain"](of_launch["LazyDict"])


def _map_of(pointer: int, *rest: Any) -> tuple:
    return "map", pointer, *map(_plain, rest)


def _plain(x: Any) -> Any:
    """x without metadata and hooks, which cached launches leave out where no hook is set."""
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    if type(x).__name__ in ("LazyDict", "HookChain"):
        return None
    return tuple(map(_plain, x)) if isinstance(x, list | tuple) else x


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple]]:
    """The launches on it."""
    launches: list[tuple] = []
    made = AbsentGPU(
        nvidia.CudaLauncher,
        launch=CFunction(launches),
        load_binary=lambda name, kernel, *_: (object(), 5, 1, 0, 1024),
        fill_tma_descriptor=_map_of,  # up to 3.6
        fill_tma_descriptor_tiled=_map_of,
        build_signature_metadata=tuple,
    )
    monkeypatch.setattr(driver, "_active", made)
    if hasattr(nvidia, "make_launcher"):  # up to 3.6 a C function for each signature
        compiled = SimpleNamespace(launch=made.utils.launch)
        monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **_: compiled)
        monkeypatch.setattr(nvidia, "library_dirs", list)
    else:
        monkeypatch.setattr(nvidia, "PyKernelArg", lambda nested_tuple, type: (nested_tuple, type))
    kernels = plain_kernel, tiles_kernel
    for kernel in kernels:
        kernel.device_caches.clear()
    yield launches
    for kernel in kernels:
        kernel.device_caches.clear()
    gc.collect()  # modules of kernels are unloaded by the driver of then


def _plain_call(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    kernel[2, 3](x, y, None, 0.5, 17, W=32)
    kernel[1,](y, x, x, 2, 1, W=32)
    return y


def _tiles_call(kernel: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    tiles = [TensorDescriptor(t, [8, 32], [32, 1], [8, 32]) for t in (x, y)]
    kernel[4,](tiles[0], y, tiles[1], 3, W=32)
    return y


@pytest.mark.parametrize("tiles", [False, True])
def test_c_function_gets_the_arguments_of_triton(tiles: bool, gpu: list[tuple]) -> None:
    kernel, call = (tiles_kernel, _tiles_call) if tiles else (plain_kernel, _plain_call)
    cached = CachedKernel(kernel)

    def call_cached(x: torch.Tensor) -> torch.Tensor:
        return call(cached, x)

    def c_arguments(run: Any, *args: Any) -> list[tuple]:
        """The arguments of a call's launches, with "x" and "y" in place of their addresses."""
        gpu.clear()
        y = run(*args)
        return _renamed(gpu, {x.data_ptr(): "x", y.data_ptr(): "y"})

    x = torch.zeros(8, 32)
    call_cached(x)
    record = call_replay.record(call_cached, (x,))[1]
    assert record is not None
    for _ in range(2):  # maps for TMA are made once
        x = torch.zeros(8, 32)
        want = c_arguments(call, FusedKernel(kernel), x)
        assert len(want) == (1 if tiles else 2) and {"x", "y"} <= set(_flat(want))
        assert c_arguments(call_cached, x) == want
        assert c_arguments(record.play, (x,)) == want


def test_descriptors_are_of_their_strides(gpu: list[tuple]) -> None:
    """At one address there are tensors of one shape and several strides, parts of wider ones."""

    def call(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(8, 32)
        tiles = TensorDescriptor(x, [8, 32], [x.stride(0), 1], [8, 32])
        cached[4,](tiles, y, TensorDescriptor(y, [8, 32], [32, 1], [8, 32]), 3, W=32)
        return y

    cached, wide = CachedKernel(tiles_kernel), torch.zeros(8 * 96)
    call(wide.as_strided((8, 32), (64, 1)))
    record = call_replay.record(call, (wide.as_strided((8, 32), (64, 1)),))[1]
    assert record is not None
    for step in (64, 96, 64):
        gpu.clear()
        record.play((wide.as_strided((8, 32), (step, 1)),))
        assert step in _flat(gpu) and {64, 96} - {step} & {*_flat(gpu)} == set()


def test_memory_outlives_launches_that_share_its_descriptor(
    gpu: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        middle, y = torch.empty_like(x), torch.empty_like(x)
        tiles = [TensorDescriptor(t, [8, 32], [32, 1], [8, 32]) for t in (x, middle, y)]
        cached[4,](tiles[0], middle, tiles[1], 3, W=32)
        cached[4,](tiles[1], y, tiles[2], 3, W=32)
        return y

    cached, x = CachedKernel(tiles_kernel), torch.zeros(8, 32)
    call(x)
    record = call_replay.record(call, (x,))[1]
    assert record is not None
    lines = [line.strip() for line in record.source.splitlines()]
    launches = [i for i, line in enumerate(lines) if "stream" in line and "(4, 1, 1" in line]
    assert len(launches) == 2 and lines.index("v1 = None") > launches[1]
    assert sum(".get(" in line for line in lines) == 3 + ("KNOWN.get(k)" in record.source)


def _flat(x: Any) -> list:
    return [z for y in x for z in _flat(y)] if isinstance(x, list | tuple) else [x]


def _renamed(x: Any, names: dict[int, str]) -> Any:
    if isinstance(x, list | tuple):
        return type(x)(_renamed(y, names) for y in x)
    return names.get(x, x) if type(x) is int else x
