"""Triton's digest of itself is what Triton computes, and is computed again once a file changes."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.compiler import triton_cache_key
from slipstream.runtime.backends import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="wants Triton")


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


def test_digest_is_remembered(triton: Any) -> None:
    want, computed = triton.fresh(), triton.computed
    assert triton.fresh() == want and triton.computed == computed


@pytest.mark.parametrize("name", ["compiler/code.py", "backends/x/driver.py", "_C/libtriton.so"])
def test_digest_follows_the_files(triton: Any, name: str) -> None:
    path = triton.root / name
    before, times = triton.fresh(), path.stat()
    path.write_text("2")  # as large, and made to look as old
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert triton.fresh() != before and "2" in triton.fresh()
    path.unlink()
    assert "2" not in triton.fresh()


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
