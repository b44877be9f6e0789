"""Triton's driver is there before its C part is built, which is done once; its digest of itself is
what Triton computes, and is computed again once a file changes."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.compiler import triton_cache_key, triton_driver
from tests.support import wants

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


@pytest.fixture
def triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A small one, that counts how often its digest is computed."""
    import triton as real
    from triton.runtime import cache

    root = tmp_path / "triton"
    for name in ("__init__.py", "compiler/code.py", "backends/x/driver.py", "_C/libtriton.so"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("1")
    made = SimpleNamespace(root=root, computed=0)

    def triton_key() -> str:
        made.computed += 1
        return f"of {sorted(x.read_text() for x in root.rglob('*') if x.is_file())}"

    def fresh() -> str:
        """As in a new process."""
        monkeypatch.setattr(cache, "triton_key", triton_key)
        triton_cache_key.reuse.cache_clear()
        triton_cache_key.reuse()
        return cache.triton_key()

    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(real, "__file__", str(root / "__init__.py"))
    made.fresh = fresh
    monkeypatch.setattr(triton_cache_key, "_begun", [])
    yield made
    triton_cache_key.reuse.cache_clear()


@wants.triton
def test_digest_is_remembered(triton: Any) -> None:
    want, computed = triton.fresh(), triton.computed
    assert triton.fresh() == want and triton.computed == computed


@wants.triton
@pytest.mark.parametrize("name", ["compiler/code.py", "backends/x/driver.py", "_C/libtriton.so"])
def test_digest_follows_the_files(triton: Any, name: str) -> None:
    path = triton.root / name
    before, times = triton.fresh(), path.stat()
    path.write_text("2")  # as large, and made to look as old
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert triton.fresh() != before and "2" in triton.fresh()
    path.unlink()
    assert "2" not in triton.fresh()


@wants.triton
@pytest.mark.parametrize("gpus", [0, 1])
def test_digest_begins_with_a_model(
    gpus: int, triton: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM

    triton.fresh()
    (triton.root / "__init__.py").write_text("3")
    triton_cache_key.reuse.cache_clear()
    before = triton.computed
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = SlipstreamConfig(mixers=["gla"], hidden_size=32, num_heads=2, vocab_size=16)
    for _ in range(2):
        SlipstreamForCausalLM(config)
    (thread,) = triton_cache_key._begun
    thread.join()
    assert thread.daemon and triton.computed == before + gpus
    triton_cache_key.finish()
    assert triton.computed == before + 1


@wants.triton
def test_digest_that_has_begun_is_waited_for(triton: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    triton.fresh()
    (triton.root / "__init__.py").write_text("3")
    triton_cache_key.reuse.cache_clear()
    before, gate = triton.computed, threading.Event()

    def device_count() -> int:
        gate.wait(60)
        return 1

    monkeypatch.setattr(torch.cuda, "device_count", device_count)
    triton_cache_key.begin()
    waits = threading.Thread(target=triton_cache_key.finish)
    waits.start()
    waits.join(0.05)
    assert waits.is_alive() and triton.computed == before
    gate.set()
    waits.join(60)
    assert triton.computed == before + 1
