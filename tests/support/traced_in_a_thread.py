"""The matrix command without its processes that trace: a start of each takes seconds."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from slipstream.tools import backend_query


def trace_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one architecture: what traces replaces attributes of torch and Triton."""
    pool = lambda processes, context: ThreadPoolExecutor(processes)  # noqa: E731
    monkeypatch.setattr(backend_query, "ProcessPoolExecutor", pool)
