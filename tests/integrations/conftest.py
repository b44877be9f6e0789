"""Models of transformers are as they were after each test."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    yield
    if "slipstream.integrations.transformers" in sys.modules:
        sys.modules["slipstream.integrations.transformers"].unpatch()
