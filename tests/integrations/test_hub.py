"""register_kernels(): transformers' use_kernels=True on slipstream's functions, in its own models.
Where the package `kernels` is, in the release that transformers wants; in a process of its own,
which transformers' functions are changed in for good."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers.utils.import_utils import is_kernels_available

from slipstream.integrations import patching, report
from slipstream.integrations.linear_mixers import FUNCTIONS
from slipstream.integrations.transformers import register_kernels
from tests.support.linear_models import tiny
from tests.support.package import ROOT
from tests.support.tiny_models import build, difference, runs_of

HERE = is_kernels_available()
NAMES = ("FalconMambaForCausalLM", "BambaForCausalLM", "Qwen3NextForCausalLM")
NAMES += ("KimiLinearForCausalLM",)


def test_functions_that_kernels_has_made_modules_of_are_known() -> None:
    class Func(torch.nn.Module):  # as kernels 0.17 makes one
        kernel_layer_name = "causal_conv1d_fn"

    assert patching.looked_up(Func()) == "causal_conv1d_fn"
    assert patching.looked_up(torch.nn.Linear(2, 2)) is None


@pytest.mark.skipif(HERE, reason="kernels is installed")
def test_release_of_kernels_is_named() -> None:
    with pytest.raises(ImportError, match=r"pip install 'kernels>=\d.*,<\d"):
        register_kernels()


@pytest.mark.skipif(not HERE, reason="no kernels of the release that transformers wants")
@pytest.mark.parametrize("name", NAMES)
def test_models_take_functions_by_use_kernels(name: str) -> None:
    code = f"from {__name__} import check; check({name!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]


def check(name: str) -> None:
    """Prompts, steps and gradients, and that ours are what ran."""
    cls, config, weights, inputs, want = tiny(name)
    gradients = trained(build(cls, config, "eager", weights), inputs)
    assert set(register_kernels()) == set(FUNCTIONS)
    model = build(cls, config, "eager", weights)
    assert report().rows == ()
    model.set_use_kernels(True)
    assert difference(runs_of(model, inputs), want) == ""
    called = {x.name.partition(".")[2]: x.calls for x in report().rows}
    assert called and set(called) <= set(FUNCTIONS) and min(called.values()) > 0
    assert [x.refused for x in report().rows] == [{}] * len(called)
    torch.testing.assert_close(trained(model, inputs), gradients, rtol=1e-3, atol=1e-5)
    assert sum(x.calls for x in report().rows) > sum(called.values())


def trained(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    model.train()(**inputs, use_cache=False).logits.float().square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
