"""tools/demo.py: what it draws and what its numbers are of."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import script

pytest.importorskip("matplotlib")


@pytest.fixture
def demo() -> Any:
    return script("tools/demo")


def test_running_mean(demo: Any) -> None:
    assert demo.running_mean([4.0, 2.0, 3.0, 7.0], 2) == [4.0, 3.0, 2.5, 5.0]


def test_plot_labels(demo: Any, tmp_path: Path) -> None:
    log: list[dict[str, float]] = [{"step": i, "bits_per_byte": 4 - i / 10} for i in range(1, 9)]
    log += [{"step": 8, "eval_bits_per_byte": 3.2}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    assert demo.history(tmp_path, demo.HELD_OUT) == [(8, 3.2)]
    drawn: list[Any] = []
    subplots = demo.plt.subplots

    def keep(**options: Any) -> Any:
        drawn[:] = subplots(**options)
        return tuple(drawn)

    demo.plt.subplots = keep
    try:
        demo.plot(tmp_path, tmp_path / "loss.png", 64)
    finally:
        demo.plt.subplots = subplots
    labels = [x.get_text() for x in drawn[1].get_legend().get_texts()]
    assert labels == [
        "training, each step",
        "training, mean of 20 steps",
        "held-out, up to 64 rows",
    ]
    assert (tmp_path / "loss.png").stat().st_size > 1000
