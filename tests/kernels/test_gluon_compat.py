"""kernels/primitives/gluon_compat.py gives kernels the names of Triton 3.6 under every release."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import slipstream.kernels

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
    words = ("fence_async_shared", "mbarrier", "warpgroup_mma", "warpgroup_mma_init")
    hopper = module("sm90", tma=tma, warpgroup_mma_wait="wait", **dict.fromkeys(words))
    gluon = module("gluon", language=language, jit=lambda fn: fn)
    root = "triton.experimental"
    return {
        "triton": module("triton", __version__=release),
        root: module(root, gluon=gluon),
        f"{root}.gluon": gluon,
        f"{root}.gluon.language": language,
        f"{root}.gluon.language.nvidia": module("nvidia"),
        f"{root}.gluon.language.nvidia.hopper": hopper,
        f"{root}.gluon.nvidia": module("nvidia"),
        f"{root}.gluon.nvidia.hopper": module("sm90", TensorDescriptor=None),
    }


COPIES = ("global_to_shared", "shared_to_global")


@pytest.mark.parametrize("release", RELEASES)
def test_gluon_has_the_same_names_under_every_release(release: str) -> None:
    path = Path(slipstream.kernels.__file__).with_name("primitives") / "gluon_compat.py"
    spec = importlib.util.spec_from_file_location("gluon_of_a_release", path)
    assert spec is not None and spec.loader is not None
    found: Any = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, released(release)):
        spec.loader.exec_module(found)
    assert (found.copy_in, found.copy_out) == COPIES
    assert found.gl.thread_barrier == "barrier"
    assert found.gl.shared_memory_descriptor._reinterpret == "views"
    assert {found.LARGER_VIEWS, found.IMPLICIT_BARRIERS} == {release < "3.8"}
    assert all(hasattr(found, x) for x in found.__all__)
