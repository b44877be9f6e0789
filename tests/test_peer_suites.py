"""tools/peer_suites.py on a checkout of a few lines."""

import csv
from pathlib import Path

from tests.support.forked import run_code

TOOL = Path(__file__).parents[1] / "tools" / "peer_suites.py"
PACKAGE = """
import torch
from causal_conv1d.nowhere import absent
import torch.nn.functional as F

class Launched:
    pass

def causal_conv1d_ref(x, weight, bias=None, activation=None):
    W, D, T = weight.shape[1], x.shape[1], x.shape[2]
    return F.conv1d(x, weight[:, None], bias, padding=W - 1, groups=D)[..., :T]

@torch.compiler.disable
def twice(x):
    return x + x

def launches(x):
    return Launched[(1,)](x)
"""
OF_PACKAGE = """
from . import causal_conv1d_fn

def convolved(x, w):
    return causal_conv1d_fn(x, w)
"""
TESTS = """
import pytest, torch
from causal_conv1d import causal_conv1d_fn, twice
from causal_conv1d.causal_conv1d_interface import causal_conv1d_ref, launches
from causal_conv1d.of_package import convolved

@pytest.mark.parametrize("T", [1, 7, 40])
def test_same(T):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, w = torch.randn(2, 8, T, device=device), torch.randn(8, 4, device=device)
    torch.testing.assert_close(causal_conv1d_fn(x, w), causal_conv1d_ref(x, w))

def test_of_a_name_that_the_package_takes_from_its_module():
    assert twice(1) == 2

def test_of_a_name_that_a_file_takes_from_its_package():
    x, w = torch.randn(2, 8, 3, device="cuda"), torch.randn(8, 4, device="cuda")
    assert convolved(x, w).shape == x.shape

def test_other():
    assert torch.zeros(1, device="cuda").sum() == 1

def test_of_a_kernel():
    launches(torch.zeros(1))
"""


def test_counts_and_reasons(tmp_path: Path) -> None:
    (tmp_path / "causal_conv1d").mkdir()
    (tmp_path / "causal_conv1d" / "__init__.py").write_text(
        "from .causal_conv1d_interface import twice"
    )
    (tmp_path / "causal_conv1d" / "causal_conv1d_interface.py").write_text(PACKAGE)
    (tmp_path / "causal_conv1d" / "of_package.py").write_text(OF_PACKAGE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_causal_conv1d.py").write_text(TESTS)
    rows = tmp_path / "rows.csv"
    run = run_code(TOOL, tmp_path, "--csv", rows, "--commit", "abc")
    assert run.returncode == 1, run.stderr
    assert "failed: test_other: AssertionError: assert" in run.stdout
    missing = "causal_conv1d.causal_conv1d_interface.launches"
    assert f"skipped 1: slipstream.compat has no {missing}" in run.stdout
    with rows.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["passed"], row["failed"], row["skipped"]) == ("5", "1", "1")
    assert (row["package"], row["commit"], row["cases"]) == ("causal_conv1d", "abc", "all")
    shared = run_code(TOOL, tmp_path, "--sample", 1, "--processes", 2)
    assert shared.returncode == 0, shared.stderr
    assert "passed 1, failed 0, skipped 0" in shared.stdout
