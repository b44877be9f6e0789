"""Fixtures of every test: fresh random data, memory that is NaN until it is written."""

import gc
import logging
import os
import re
import sys
import zlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

# a graph that Inductor kept knows nothing of an operator whose schema has changed since
os.environ |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
# MKL's products of some of a batch's matrices then have the bits of those of all of them, on every
# processor: by itself it takes other instructions for fewer (Emerald Rapids, MKL 2024.2)
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
if "PYTEST_XDIST_WORKER" in os.environ:  # each process of several has one core
    torch.set_num_threads(1)
# what a developer or a CI has set for other runs, such as how wide and coloured a line is
OTHERS = r"FORCE_COLOR$|NO_COLOR$|PY_COLORS$|TTY_|COLUMNS$|LINES$|GITHUB_ACTIONS$"
collect_ignore = []
if not torch.cuda.is_available():
    OTHERS += "|SLIPSTREAM_"  # where there is one they say how the tests run
    collect_ignore += ["gpu"]
    # torch's own writes down its call stack for each kind of device that may come
    torch.manual_seed = torch.default_generator.manual_seed
for name in [x for x in os.environ if re.match(OTHERS, x)]:
    del os.environ[name]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and cases stay to the end: no look at them for what is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger):  # pytest would visit torch's 60 six times a test
                logger.propagate = True


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, cases that need one are deselected, as slow ones are."""
    if torch.cuda.is_available():
        return
    away = [x for x in items if x.get_closest_marker("gpu")]
    items[:] = [x for x in items if not x.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=away)


def pytest_itemcollected(item: pytest.Item) -> None:
    """`@pytest.mark.sample(which=f)`: cases whose parameters f does not take are slow."""
    for mark in item.iter_markers("sample"):
        if not mark.kwargs["which"](**getattr(item, "callspec").params):  # noqa: B009
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _nan_in_fresh_memory() -> Iterator[None]:
    """torch.empty and its kin hold NaN, so a result that was never written shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Variables that a test sets, such as the ptxas that commands select, are gone after it."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


def _settings() -> dict[str, object]:
    """What a test leaves as it found it."""
    knobs: Any = sys.modules.get("triton.knobs")
    hooks = [] if knobs is None else [*knobs.runtime.launch_enter_hook.calls]
    patching: Any = sys.modules.get("slipstream.integrations.patching")
    layer: Any = patching and patching.GradientCheckpointingLayer
    return {
        "not to be imported": [x for x in ("fla", "mamba_ssm") if sys.modules.get(x, x) is None],
        "transformers is patched": bool(patching) and hasattr(layer.__call__, patching.ORIGINAL),
        "triton.knobs.runtime.launch_enter_hook": hooks,
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.get_default_device(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "os.getcwd()": os.getcwd(),
        "sys.path": [*sys.path],
    }


# The package's modules, looked for again when there are other modules than before.
_names: dict[int, list[str]] = {}


def _modules() -> dict[str, ModuleType]:
    loaded = dict(sys.modules)  # at once: threads import
    if len(loaded) not in _names:  # of 6,000 a tenth are the package's
        _names.clear()
        _names[len(loaded)] = [x for x in loaded if x.startswith("slipstream")]
    return {x: loaded[x] for x in _names[len(loaded)] if x in loaded}


@pytest.fixture(autouse=True)
def _leaves_settings_alone() -> Iterator[None]:
    """A test that sets what others rely on, or imports a module of the package once more, fails."""
    before = _settings()
    modules = _modules()
    yield
    after = _settings()
    left = [f"{name}: {x}, then {after[name]}" for name, x in before.items() if after[name] != x]
    left += [f"sys.modules: {x}" for x, y in modules.items() if sys.modules.get(x) is not y]
    assert not left, f"left behind: {left}"


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """The same data for the same test, different data for different ones."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
