"""Variables of the environment that turn something on or off."""

import os
import subprocess
import sys

import pytest

from slipstream.common.checks import is_on

STATES = """
from slipstream.runtime import call_replay, compile_ahead
print(call_replay.ENABLED, compile_ahead.ENABLED)
"""


@pytest.mark.parametrize(("value", "on"), [(None, True), ("1", True), ("off", False), ("0", False)])
def test_is_on_takes_words_and_digits(
    value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLIPSTREAM_AHEAD", raising=False)
    if value is not None:
        monkeypatch.setenv("SLIPSTREAM_AHEAD", value)
    assert is_on("SLIPSTREAM_AHEAD") is on


def test_is_on_refuses_other_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_REPLAY", "false")
    with pytest.raises(ValueError, match="SLIPSTREAM_REPLAY: want on or off, got 'false'"):
        is_on("SLIPSTREAM_REPLAY")


def test_switches_turn_replay_and_compilation_ahead_off() -> None:
    env = {**os.environ, "SLIPSTREAM_AHEAD": "0", "SLIPSTREAM_REPLAY": "0"}
    command = [sys.executable, "-c", STATES]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"], done.stderr
