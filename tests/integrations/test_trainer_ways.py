"""transformers' Trainer with the options that people set, alone and together, for every mixer: the
losses and weights of a loop that takes one row at a time."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.support import trainer_runs
from tests.support.trainer_runs import MODELS, assert_same_weights, losses, make, own_loop, trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and transformers about one another


class Way(NamedTuple):
    options: dict[str, Any]
    side: str = "right"
    smoothing: float = 0.0
    rounded: bool = False


def checkpointed(reentrant: bool) -> dict[str, Any]:
    return {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
    }


HALVES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
WAYS: dict[str, Way] = {
    "padded right": Way({}),
    "padded left": Way({}, "left"),
    "accumulated": Way({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}),
    "checkpointed": Way(checkpointed(False)),
    "reentrant, accumulated": Way(checkpointed(True) | HALVES, "left"),
    "bf16": Way({"bf16": True}, rounded=True),
    "bf16, checkpointed": Way({"bf16": True, **checkpointed(False)}, rounded=True),
    "smoothed": Way({"label_smoothing_factor": 0.1}, smoothing=0.1),
    "smoothed, accumulated": Way({"label_smoothing_factor": 0.1, **HALVES}, "left", smoothing=0.1),
    "found batch size": Way({"auto_find_batch_size": True}),
    "counted tokens": Way({"include_num_input_tokens_seen": "non_padding"}),
    "deterministic": Way({"full_determinism": True}),
}
SAMPLE = {"reentrant, accumulated", "smoothed, accumulated"}


@functools.cache
def wanted(name: str, smoothing: float) -> tuple[nn.Module, list[float]]:
    model = make(name)
    found = own_loop(model, smoothing)
    return model.requires_grad_(False), found


def check(name: str, way: Way, folder: Path) -> None:
    want, wanted_losses = wanted(name, way.smoothing)
    model = make(name)
    run = trainer(model, folder, way.side, **way.options)
    run.train()
    near = 3e-2 if way.rounded else 2e-4
    assert losses(run) == pytest.approx(wanted_losses, rel=near)
    if not way.rounded:
        assert_same_weights(model, want)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(which=lambda name, way: name == "every" and way in SAMPLE)
def test_trainer_in_a_way_is_the_same(name: str, way: str, tmp_path: Path) -> None:
    check(name, WAYS[way], tmp_path)


# ---- what else is done with a run


every_model = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "every" else pytest.mark.slow) for n in MODELS]
)


@every_model
def test_trainer_resumes(name: str, tmp_path: Path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 2}
    trainer(make(name), tmp_path, max_steps=2, **saved).train()
    model = make(name)
    trainer(model, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_weights(model, wanted(name, 0.0)[0])


@pytest.mark.slow
def test_trainer_resumes_to_the_bit(tmp_path: Path) -> None:
    adam = {"optim": "adamw_torch", "learning_rate": 1e-3, "bf16": True, **checkpointed(False)}
    adam |= {"save_strategy": "steps", "save_steps": 2}
    whole, again = make("every"), make("every")
    trainer(whole, tmp_path / "a", **adam).train()
    run = trainer(again, tmp_path / "b", **adam)
    run.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    torch.testing.assert_close([*again.parameters()], [*whole.parameters()], rtol=0, atol=0)


@pytest.mark.slow
def test_loss_of_rows_is_the_loss_of_each() -> None:
    """The loop above relies on this."""
    model = make("every").eval()
    data = trainer_runs.rows()[:4]
    count = sum(len(x["input_ids"]) - 1 for x in data)
    want = sum(float(trainer_runs.row_loss(model, x["input_ids"]).detach()) for x in data) / count
    for side in ("left", "right"):
        found = float(model(**trainer_runs.Padded(side)(data)).loss.detach())
        assert found == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_trainer_takes_batches_without_labels(accumulated: int, tmp_path: Path) -> None:
    """Such as prompts that are longer than the cut: a step of them leaves the weights alone."""
    model, data = make("gla"), trainer_runs.rows()
    for row in data[4:8]:
        row["labels"] = torch.full_like(row["labels"], -100)
    options = {"per_device_train_batch_size": 4 // accumulated}
    run = trainer(model, tmp_path, gradient_accumulation_steps=accumulated, **options)
    run.train_dataset = data
    run.train()
    want = make("gla")
    own_loop(want, batches=(0, 2))
    assert losses(run)[1] == 0
    assert_same_weights(model, want)
