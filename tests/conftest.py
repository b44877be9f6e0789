"""Fixtures of every test: fresh random data, memory that is NaN until it is written."""

import gc
import logging
import os
import zlib
from collections.abc import Iterator

import pytest
import torch

# a graph that Inductor kept knows nothing of an operator whose schema has changed since
os.environ |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
if "PYTEST_XDIST_WORKER" in os.environ:  # each process of several has one core
    torch.set_num_threads(1)


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


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """The same data for the same test, different data for different ones."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
