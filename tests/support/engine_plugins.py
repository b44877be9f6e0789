"""slipstream as an installed package with its plugins, for the engines' own loaders of plugins."""

import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from slipstream import integrations
from slipstream.integrations import usage
from tests.support.package import PROJECT


def forget_vllm() -> None:
    """Our modules that import vLLM's, and what they have reported."""
    usage.remove("vllm")
    for name in ("vllm_classes", "vllm_layers", "vllm_steps"):
        if sys.modules.pop(f"slipstream.integrations.{name}", None) is not None:
            delattr(integrations, name)


def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The entry points of pyproject.toml, before those of a slipstream that is installed: the first
    of a name counts."""
    info = tmp_path / "slipstream-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slipstream\nVersion: 9\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{k} = {v}" for k, v in points.items())])
        for group, points in PROJECT["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))
    monkeypatch.syspath_prepend(str(tmp_path))


def loader(plugins: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The function of the engine's module that loads plugins, which forgets that it has done so."""
    if plugins.__name__ == "vllm.plugins":
        monkeypatch.setattr(plugins.envs, "VLLM_PLUGINS", None)
        flag, function = "plugins_loaded", plugins.load_general_plugins
    else:
        flag, function = "_plugins_loaded", plugins.load_plugins

    def call() -> None:
        monkeypatch.setattr(plugins, flag, False)
        function()

    return call


def everywhere(call: Callable[[], None], found: Callable[[], Any]) -> Any:
    """What is found after the call in eight threads at once, again and in a forked process."""
    meet = Barrier(8)

    def together() -> None:
        meet.wait()
        call()

    with ThreadPoolExecutor(8) as pool:
        for x in [pool.submit(together) for _ in range(8)]:
            x.result()
    before = found()
    call()
    child = os.fork()
    if child == 0:
        same = False
        try:
            call()
            same = found() == before
        finally:
            os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0 and found() == before
    return before


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [x.getMessage() for x in caplog.records if x.levelno >= logging.WARNING]
