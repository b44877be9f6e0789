"""tools/demo.py: what it draws and what its numbers are of."""

from typing import Any

import pytest

from tests.support.scripts import script

pytest.importorskip("matplotlib")


@pytest.fixture
def demo() -> Any:
    return script("tools/demo")


def test_running_mean(demo: Any) -> None:
    assert demo.running_mean([4.0, 2.0, 3.0, 7.0], 2) == [4.0, 3.0, 2.5, 5.0]
