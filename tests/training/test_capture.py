"""CapturedLoss around its graphs: on a CPU, calls that fill the same tensors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from slipstream.runtime import captured_loss
from slipstream.training import CapturedLoss, trainer
from slipstream.training.config import from_dict
from slipstream.training.interrupt import Interrupt
from slipstream.training.run import train


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.unused = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return SimpleNamespace(loss=scale * (x * self.weight).sin().sum())


class OnCpu(CapturedLoss):
    captures = 0

    def _takes(self, tensors: dict[str, Tensor]) -> bool:
        return self.model.training and torch.is_grad_enabled()

    def _capture(self, inputs: Any, tensors: Any, parameters: Any) -> Any:
        self.captures += 1
        own = {name: x.clone() for name, x in tensors.items()}
        live: list[Tensor] = []
        loss, dloss = torch.empty(()), torch.ones(())

        def forward() -> None:
            with torch.enable_grad():
                live[:] = [self.model(**{**inputs, **own}).loss]
            loss.copy_(live[0].detach())

        def gradients() -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(live[0], parameters, dloss, allow_unused=True)

        def backward() -> None:
            for x, y in zip(grads, gradients(), strict=True):
                if x is not None and y is not None:
                    x.copy_(y)

        forward()
        grads = gradients()
        graphs = SimpleNamespace(replay=forward), SimpleNamespace(replay=backward)
        return captured_loss._Captured(*graphs, own, loss, dloss, grads)


@pytest.fixture
def pair() -> tuple[OnCpu, Model]:
    return OnCpu(Model().train()), Model().train()


def test_gradients_that_are_kept_stay(pair: tuple[OnCpu, Model]) -> None:
    captured, model = pair
    kept = []
    for _ in range(3):
        x = torch.randn(3)
        got = torch.autograd.grad(captured(x=x), captured.model.get_parameter("weight"))
        kept += [*zip(got, torch.autograd.grad(model(x).loss, model.weight))]
        for loss in (captured(x=x), model(x).loss):
            loss.backward()
        kept.append((captured.model.get_parameter("weight").grad, model.weight.grad))
        captured.model.zero_grad()
        model.zero_grad()
    for got, want in kept:
        torch.testing.assert_close(got, want)


def test_inputs_without_a_hash_run_as_written(pair: tuple[OnCpu, Model]) -> None:
    captured, model = pair
    x = torch.randn(3)
    scale: Any = [2.0]
    captured.model.forward = lambda x, scale: model(x, scale[0])
    torch.testing.assert_close(captured(x=x, scale=scale), model(x, 2.0).loss)
    assert captured.captures == 0


def test_steps_are_those_of_the_model(pair: tuple[OnCpu, Model]) -> None:
    captured, model = pair
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (captured.model, model)]
    losses = []
    for _ in range(4):
        x = torch.randn(3)
        got, want = captured(x=x), model(x).loss
        losses.append((got, want.detach()))
        for loss, optimizer in zip((got, want), optimizers):
            (loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    for got, want in losses:  # each its own, not the last one's
        torch.testing.assert_close(got.detach(), want)
    torch.testing.assert_close(captured.model.state_dict(), model.state_dict())
    assert captured.captures == 1
    assert captured.model.unused.grad is None


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_accumulate(pair: tuple[OnCpu, Model], to_none: bool) -> None:
    captured, model = pair
    for _ in range(2):
        for m in (captured.model, model):
            m.zero_grad(set_to_none=to_none)
        kept = []
        for _ in range(3):
            x = torch.randn(3)
            captured(x=x).backward()
            model(x).loss.backward()
            kept.append((captured.model.weight.grad.clone(), model.weight.grad.clone()))
        for got, want in kept:
            torch.testing.assert_close(got, want)


def test_backward_after_another_batch_is_an_error(pair: tuple[OnCpu, Model]) -> None:
    captured, _ = pair
    first, second = captured(x=torch.randn(3)), captured(x=torch.randn(3))
    with pytest.raises(RuntimeError, match="another batch ran"):
        first.backward()
    second.backward()


def test_other_shapes_and_evaluation_run_as_written(pair: tuple[OnCpu, Model]) -> None:
    captured, model = pair
    x = torch.randn(3)
    captured(x=x).backward()
    torch.testing.assert_close(captured(x=x, scale=2.0), model(x, 2.0).loss)
    captured(x=torch.randn(1, 3)).backward()
    with torch.no_grad():
        assert not captured(x=x).requires_grad
    captured.model.eval()
    captured(x=x)
    assert captured.captures == 1
    captured.model.train()
    captured.model.weight = nn.Parameter(torch.zeros(3))  # the graph has another
    torch.testing.assert_close(captured(x=x), torch.zeros(()))


def test_models_on_a_cpu_are_not_captured() -> None:
    model = Model().train()
    captured = CapturedLoss(model)
    captured(x=torch.randn(3)).backward()
    assert not captured._captured and model.weight.grad is not None


def test_training_runs_are_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where gradients of two batches are added up, each divided by the labels of both."""
    found: list[Any] = []
    made: list[OnCpu] = []
    monkeypatch.setattr(trainer, "CapturedLoss", lambda model: made.append(OnCpu(model)) or made[0])
    for captures in (False, True):
        raw = {
            "output_dir": str(tmp_path / str(captures)),
            "model": {"hidden_size": 16, "num_heads": 1, "mixers": ["retention"]},
            "tokenizer": {"vocab_size": 300, "train_bytes": 20000},
            "data": {"files": ["{stdlib}/json"], "held_out": 0.4, "row_tokens": 16},
            "training": {"max_steps": 3, "gradient_accumulation_steps": 2, "use_cpu": True},
            "capture": captures,
        }
        found.append(train(from_dict(raw), Interrupt(), Console(quiet=True)))
    assert found[0].held_out == pytest.approx(found[1].held_out, rel=1e-5)
    assert [(x.captures, x.runs) for x in made] == [(1, 6)]
