"""Every test here wants a GPU; where there is none, tests/conftest.py leaves it out."""

import pytest

DEBUG_MODE = "ignore:Synchronization debug mode"


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.gpu)
    item.add_marker(pytest.mark.filterwarnings(DEBUG_MODE))
