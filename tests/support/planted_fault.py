"""An entry for the table of compiler faults that no release has, and a table with it."""

import pytest

from slipstream.compiler import known_bugs

FAULT = known_bugs.KnownBug(
    name="planted-fault",
    archs=("sm_75",),
    triton=("3.6.0", "3.7.1"),
    ptxas=None,
    trigger="dot16",
    pattern="a product of 16 bits, as far as a test says so",
    effect="crash",
    source="tests/support/planted_fault.py",
    way_out="float32 inputs",
)


def plant(monkeypatch: pytest.MonkeyPatch, fault: known_bugs.KnownBug = FAULT) -> None:
    """Adds it to the table."""
    monkeypatch.setattr(known_bugs, "KNOWN_BUGS", (*known_bugs.KNOWN_BUGS, fault))
