"""Fixtures of tests of models."""

import pytest

from slipstream.models import graphs
from tests.support.replayed import ReplayedCalls


@pytest.fixture
def graphs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "graph_on", lambda device: ReplayedCalls())
