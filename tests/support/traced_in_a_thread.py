"""The matrix without its processes that trace: a start of each takes seconds."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.scripts import script


def trace_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one architecture: what traces replaces attributes of torch and Triton."""
    pool = lambda processes, context: ThreadPoolExecutor(processes)  # noqa: E731
    monkeypatch.setattr(script("tools/matrix"), "ProcessPoolExecutor", pool)
