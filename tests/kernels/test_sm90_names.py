"""kernels/primitives/sm90.py gives kernels the names of Triton 3.6 under every release."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import slipstream.kernels
from tests.support import wants

RELEASES = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")


def module(name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(names)
    return made


def released(release: str) -> dict[str, ModuleType]:
    """Triton's modules with the names that a release has."""
    new, newest = release >= "3.7", release >= "3.9"
    descriptor = type("descriptor", (), {"reinterpret" if newest else "_reinterpret": "views"})
    barrier = {"barrier" if new else "thread_barrier": "barrier"}
    language = module("language", shared_memory_descriptor=descriptor, constexpr=bool, **barrier)
    # 3.9 has the old names, too, and they raise
    copies = {f"async_copy_{x}": "removed" if newest else x for x in COPIES}
    if new:
        copies |= {"async_load": "global_to_shared", "async_store": "shared_to_global"}
    tma = SimpleNamespace(store_wait="wait", **copies)
    # Ampere's, one way alone, have the new name from 3.8 on
    name = "async_load" if release >= "3.8" else "async_copy_global_to_shared"
    ampere = SimpleNamespace(**({"async_copy_global_to_shared": "removed"} | {name: COPIES[0]}))
    words = ("fence_async_shared", "mbarrier", "warpgroup_mma", "warpgroup_mma_wait")
    hopper = module("sm90", tma=tma, **dict.fromkeys(words, "same"))
    gluon = module("gluon", language=language, jit=lambda fn=None, **_: fn or (lambda fn: fn))
    root = "triton.experimental"
    return {
        "triton": module("triton", __version__=release),
        root: module(root, gluon=gluon),
        f"{root}.gluon": gluon,
        f"{root}.gluon.language": language,
        f"{root}.gluon.language.nvidia": module("nvidia", hopper=hopper),
        f"{root}.gluon.language.nvidia.ampere": module("ampere", async_copy=ampere),
        f"{root}.gluon.language.nvidia.hopper": hopper,
        f"{root}.gluon.nvidia": module("nvidia"),
        f"{root}.gluon.nvidia.hopper": module("sm90", TensorDescriptor=None),
    }


COPIES = ("global_to_shared", "shared_to_global")


def load(path: str, modules: dict[str, ModuleType]) -> Any:
    """A module of slipstream/kernels, run with these in the place of those that are here."""
    place = Path(slipstream.kernels.__file__).parent / path
    spec = importlib.util.spec_from_file_location("kernels_of_a_release", place)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, modules):
        spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_gluon_has_the_same_names_under_every_release(release: str) -> None:
    triton = released(release)
    found = load("primitives/sm90.py", triton)
    assert (found.copy_in, found.copy_out) == COPIES
    assert found.gl.thread_barrier == "barrier"
    assert found.gl.shared_memory_descriptor._reinterpret == "views"
    assert {found.LARGER_VIEWS, found.IMPLICIT_BARRIERS} == {release < "3.8"}
    assert {found.mbarrier, found.fence_async_shared, found.warpgroup_mma_wait} == {"same"}


@pytest.mark.parametrize("release", RELEASES)
def test_threads_meet_where_triton_has_no_barrier(release: str) -> None:
    found, calls = load("primitives/sm90.py", released(release)), []
    found.gl.thread_barrier = lambda: calls.append("barrier")
    found.threads_together()
    assert calls == ["barrier"] * (not found.IMPLICIT_BARRIERS)


class Tile(NamedTuple):
    """A tensor, with what Triton's have."""

    x: torch.Tensor

    def to(self, dtype: Any, bitcast: bool = False) -> "Tile":
        to = {"int32": torch.int32, "fp32": torch.float32, "bf16": torch.bfloat16}[str(dtype)]
        return Tile(self.x.view(to) if bitcast else self.x.to(to))

    def __and__(self, other: int) -> "Tile":
        return Tile(self.x & other)

    def __sub__(self, other: "Tile") -> "Tile":
        return Tile(self.x - other.x)


@wants.triton
def test_halves_have_sixteen_bits_of_a_number() -> None:
    from slipstream.kernels.primitives.sm90_device import halves

    x = torch.randn(1000)
    high, low = (y.x.float() for y in halves.fn(Tile(x)))
    assert (high.abs() <= x.abs()).all() and (high != x).any()  # cut, not rounded
    assert ((x - high - low).abs() <= 2.0**-16 * x.abs()).all()
