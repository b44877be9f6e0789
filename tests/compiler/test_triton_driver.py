"""Triton's driver is there before its C part is built, which is done once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from slipstream.compiler import triton_driver

nvidia = pytest.importorskip("triton.backends.nvidia.driver")
config: Any = pytest.importorskip("triton.runtime").driver


class Utils:
    """Takes until it is let go; the first `failures` times there is no compiler."""

    begun = 0
    made = 0
    failures = 0
    go = threading.Event()

    def __init__(self) -> None:
        Utils.begun += 1
        assert self.go.wait(30)
        Utils.made += 1
        if Utils.made <= Utils.failures:
            raise RuntimeError("no C compiler")


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_active", None)
    monkeypatch.setattr(config, "_default", None)
    monkeypatch.setattr(nvidia, "CudaUtils", Utils)
    monkeypatch.setattr(nvidia.CudaDriver, "is_active", staticmethod(lambda: True))
    monkeypatch.setattr(triton_driver, "RELEASE", "")
    monkeypatch.setattr(Utils, "begun", 0)
    monkeypatch.setattr(Utils, "made", 0)
    monkeypatch.setattr(Utils, "failures", 0)
    monkeypatch.setattr(Utils, "go", threading.Event())


@pytest.mark.usefixtures("untouched")
def test_driver_does_not_wait_for_its_c_part() -> None:
    build = triton_driver.begin()
    active = config.active
    assert isinstance(active, nvidia.CudaDriver)
    assert callable(active.get_current_stream) and callable(active.get_current_device)
    # as Python 3.12 asks, whose property has no lock of its own
    asked = vars(type(active))["utils"].func
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(build), *(pool.submit(asked, active) for _ in range(2))]
        found.append(pool.submit(lambda: active.utils))
        time.sleep(0.1)  # all have asked
        begun, made = Utils.begun, Utils.made
        Utils.go.set()
        assert begun == 1 and made == 0
        assert len({x.result() for x in found}) == 1
    assert Utils.made == 1


@pytest.mark.usefixtures("untouched")
def test_launcher_is_loaded_after_the_type_of_its_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Launcher:
        """Does what Triton's module does when it is loaded, once."""

        def __init__(self, src: object, metadata: object) -> None:
            self.descriptor = nvidia.PyCUtensorMap

    class TypedUtils(Utils):
        def __init__(self) -> None:
            super().__init__()
            monkeypatch.setattr(nvidia, "PyCUtensorMap", Utils)

    monkeypatch.setattr(nvidia, "PyCUtensorMap", None)
    monkeypatch.setattr(nvidia, "CudaUtils", TypedUtils)
    monkeypatch.setattr(nvidia, "CudaLauncher", Launcher)
    build = triton_driver.begin()
    with ThreadPoolExecutor(2) as pool:
        launcher = pool.submit(config.active.launcher_cls, None, None)
        threading.Timer(0.05, Utils.go.set).start()
        pool.submit(build).result()
        assert type(launcher.result()) is Launcher
        assert launcher.result().descriptor is Utils


@pytest.mark.usefixtures("untouched")
def test_c_part_is_tried_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Utils, "failures", 2)
    Utils.go.set()
    build = triton_driver.begin()
    for ask in (build, lambda: config.active.utils):
        with pytest.raises(RuntimeError, match="no C compiler"):
            ask()
    assert isinstance(config.active.utils, Utils)
