"""Every example runs on a CPU and does what it says."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

from tests.support.processes import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
MOST_LINES = 80
# file -> what holds for the result of main, called with few steps where it trains
CHECKS: dict[str, tuple[dict[str, int], Callable[[Any], bool]]] = {
    "train_layer.py": ({"steps": 150}, lambda right: right > 0.9),
    "custom_mixer.py": ({}, lambda apart: apart < 1e-5),
    "packed_training.py": ({"steps": 30}, lambda losses: losses[1] < 0.5 * losses[0]),
    "decoding_pool.py": ({}, lambda apart: apart < 1e-5),
    "grpo_trees.py": ({"steps": 3}, lambda apart: apart < 1e-4),
    "context_parallel.py": ({}, lambda apart: 0 < apart < 1e-4),
    "exported_model.py": ({}, lambda apart: apart < 1e-5),
    # some guesses are wrong, or it would be 40 tokens in 9 calls
    "speculative_decoding.py": ({}, lambda each: 1 < each < 4.4),
    "patched_transformers.py": ({}, lambda apart: apart < 1e-5),
}


def test_every_example_is_checked_and_listed() -> None:
    files = {x.name for x in EXAMPLES.glob("*.py")}
    assert files == set(CHECKS)
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"({x.name})" in listed for x in EXAMPLES.iterdir() if x.suffix in (".py", ".ipynb"))


@pytest.mark.parametrize(
    "name",
    # two processes that torchrun starts: its ranks are forked below
    [pytest.param(x, marks=pytest.mark.slow if x == "context_parallel.py" else ()) for x in CHECKS],
)
def test_example_runs(name: str) -> None:
    path = EXAMPLES / name
    if name == "grpo_trees.py":
        pytest.importorskip("trl")
    assert len(path.read_text().splitlines()) <= MOST_LINES
    arguments, holds = CHECKS[name]
    assert holds(runpy.run_path(str(path))["main"](**arguments))


def test_ranks_of_an_example_run() -> None:
    name = "context_parallel.py"
    apart = float(run_ranks([], EXAMPLES / name).split()[-1])
    assert CHECKS[name][1](apart)


def test_notebook_runs() -> None:
    """Its cells in order, each plot with its lines."""
    matplotlib.use("Agg")
    notebook = json.loads((EXAMPLES / "what_a_state_remembers.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    plt.close("all")  # what other tests left open
    try:
        for i, cell in enumerate(x for x in notebook["cells"] if x["cell_type"] == "code"):
            exec(compile("".join(cell["source"]), f"cell {i}", "exec"), names)
        assert len(plt.get_fignums()) == 3
        assert all(plt.figure(x).axes[0].lines for x in plt.get_fignums())
    finally:
        torch.set_grad_enabled(True)
        plt.close("all")
