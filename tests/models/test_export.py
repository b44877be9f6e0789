"""torch.export with gradients enabled; layers of one kind share a graph under torch.compile."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from slipstream.models import MIXERS, SlipstreamConfig, SlipstreamForCausalLM
from tests.support.forked import run_code
from tests.support.language_models import small_model

MODELS = {name: [name] for name in MIXERS}
MODELS["hybrid"] = ["gated_deltanet", "rwkv7", "attention"]


def _gradients(module: nn.Module, logits: Tensor) -> dict[str, Tensor | None]:
    module.zero_grad()
    logits.square().sum().backward()
    found = {n: p.grad for n, p in module.named_parameters()}
    module.zero_grad()
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "hybrid" else pytest.mark.slow) for n in MODELS]
)
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exported_model_runs_with_gradients(name: str, strict: bool) -> None:
    model = small_model(MODELS[name]).train()
    ids = torch.randint(17, (2, 7))
    assert torch.is_grad_enabled()
    program = torch.export.export(model, (ids,), strict=strict)
    exported = program.module()
    logits, want = exported(ids).logits, model(ids).logits
    torch.testing.assert_close(logits, want)
    grads = _gradients(exported, logits)
    # a strict export has no parameters that are not used
    for n, want_grad in _gradients(model, want).items():
        torch.testing.assert_close(grads.get(n), want_grad, rtol=1e-4, atol=1e-4, msg=n)
    with torch.no_grad():
        torch.testing.assert_close(exported(ids).logits, want)


def test_saved_export_loads_by_the_guides_imports(tmp_path: Path) -> None:
    model, x, ids = small_model(["gla"]).eval(), torch.randn(1, 7, 16), torch.ones(1, 7)
    layer = model.model.layers[0].mixer
    saved = [(layer, (x,), "slipstream"), (model, (ids.long(),), "slipstream.models")]
    for module, args, name in saved:
        options = {"use_cache": False}
        torch.export.save(
            torch.export.export(module, args, options, strict=False), tmp_path / "x.pt2"
        )
        load = f"import sys, torch, {name}; torch.export.load(sys.argv[1]).module()"
        done = run_code(load, tmp_path / "x.pt2")
        assert done.returncode == 0, done.stderr[-2000:]


# of Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(("mixer", "graphs"), [("kda", 1), ("rwkv7", 2)])
def test_layers_share_a_graph(mixer: str, graphs: int) -> None:
    """rwkv7's first layer makes the value that others take."""
    mixers: list[Any] = [mixer] * 3
    config = SlipstreamConfig(vocab_size=64, hidden_size=64, num_heads=2, mixers=mixers)
    model: Any = SlipstreamForCausalLM(config).train()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    torch._dynamo.reset()
    counters.clear()
    ids = torch.arange(2 * 20).remainder(64).view(2, 20)
    model(input_ids=ids, labels=ids).loss.backward()
    assert counters["stats"]["unique_graphs"] == graphs
