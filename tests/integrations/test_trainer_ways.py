"""transformers' Trainer with the options that people set, alone and together, for every mixer: the
losses and weights of a loop that takes one row at a time."""

import copy
import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback

from slipstream import ops
from slipstream.models import SlipstreamForCausalLM
from tests.support.trainer_runs import (
    IDS,
    MODELS,
    Padded,
    arguments,
    assert_same_weights,
    generated,
    losses,
    make,
    own_loop,
    row_loss,
    rows,
    trainer,
)

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
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
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
# of several minutes for a model of all mixers
COMPILED_WAYS: dict[str, Way] = {
    "compiled": Way(COMPILED),
    "compiled, checkpointed, accumulated": Way(COMPILED | checkpointed(False) | HALVES),
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


@pytest.mark.slow
@pytest.mark.parametrize("way", COMPILED_WAYS)
@pytest.mark.parametrize("name", ["gla", "gated_deltanet", "rwkv7", "mamba2", "attention"])
def test_compiled_trainer_is_the_same(name: str, way: str, tmp_path: Path) -> None:
    torch.compiler.reset()
    check(name, COMPILED_WAYS[way], tmp_path)


# ---- workers


class Scored(Dataset):
    """Rows of which a worker computes something by our operators, and a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Tensor:
        x = torch.arange(1.0, 65.0).view(1, 8, 2, 4).mul(i + 1).sin()
        o, _ = ops.chunk_retention(x, x, x)
        with torch.no_grad():
            return torch.stack(
                [o.sum(), self.model(input_ids=rows()[i]["input_ids"][None]).logits.sum()]
            )


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_run_operators(start: str) -> None:
    """Forks of a process whose threads have run the operators before."""
    data = Scored(make("every").eval())
    want = torch.stack([data[i] for i in range(6)])
    loader = DataLoader(
        data, batch_size=2, num_workers=2, multiprocessing_context=start, persistent_workers=True
    )
    for _ in range(2):
        torch.testing.assert_close(torch.cat(list(loader)), want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_trainer_with_workers_is_the_same(start: str, tmp_path: Path) -> None:
    workers = {"dataloader_num_workers": 2, "dataloader_multiprocessing_context": start}
    check("every", Way({**workers, "dataloader_persistent_workers": True}), tmp_path)


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
    for p, q in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
def test_trainer_predicts_every_row(side: str, tmp_path: Path) -> None:
    model, data = make("every").eval(), rows()[:6]
    options = {"eval_accumulation_steps": 1, "include_for_metrics": ["inputs", "loss"]}
    found = trainer(model, tmp_path, side, **options).predict(data).predictions
    for i, row in enumerate(data):
        ids = row["input_ids"]
        longest = max(len(x["input_ids"]) for x in data[i // 4 * 4 : i // 4 * 4 + 4])
        own = slice(longest - len(ids), longest) if side == "left" else slice(len(ids))
        with torch.no_grad():
            want = model(input_ids=ids[None]).logits[0]
        torch.testing.assert_close(torch.as_tensor(found[i][own]), want, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_trainer_evaluates_in_bf16(tmp_path: Path) -> None:
    want = trainer(make("every"), tmp_path).evaluate()["eval_loss"]
    run = trainer(make("every"), tmp_path, bf16_full_eval=True)
    assert run.evaluate()["eval_loss"] == pytest.approx(want, rel=3e-2)
    assert next(run.model.parameters()).dtype == torch.bfloat16


@pytest.mark.slow
def test_trainer_loads_the_best_model(tmp_path: Path) -> None:
    each = {
        f"{x}_{y}": z for x in ("eval", "save") for y, z in (("strategy", "steps"), ("steps", 1))
    }
    model = make("every")
    run = trainer(model, tmp_path, load_best_model_at_end=True, save_total_limit=1, **each)
    run.train()
    want = make("every")
    own_loop(want, steps=run.state.best_global_step)
    assert_same_weights(model, want)


class Average(TrainerCallback):
    """A copy of the model, whose weights go half of the way to it after each step."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        self.model = copy.deepcopy(model)

    @torch.no_grad()
    def on_step_end(self, *args: Any, model: Any, **_: Any) -> None:
        for p, q in zip(self.model.parameters(), model.parameters()):
            p.lerp_(q, 0.5)


@pytest.mark.slow
def test_trainer_with_an_average_of_weights(tmp_path: Path) -> None:
    average = Average()
    trainer(make("every"), tmp_path, others={"callbacks": [average]}).train()
    want = make("every")
    weights = [p.detach().clone() for p in want.parameters()]
    for steps in range(1, 4):
        at = make("every")
        own_loop(at, steps=steps)
        weights = [w.lerp(p.detach(), 0.5) for w, p in zip(weights, at.parameters())]
    with torch.no_grad():
        for p, w in zip(want.parameters(), weights):
            p.copy_(w)
    assert_same_weights(average.model, want)
    assert torch.equal(
        generated(average.model.eval(), IDS[:, :4]), generated(want.eval(), IDS[:, :4])
    )


@pytest.mark.slow
@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.5)], ids=["swa", "ema"])
def test_averaged_model_of_torch(average: Any, tmp_path: Path) -> None:
    model = make("every").train()
    averaged = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
    averaged(input_ids=IDS, labels=IDS).loss.backward()
    torch.save(averaged.state_dict(), tmp_path / "averaged.pt")
    again = AveragedModel(make("every"), use_buffers=True)
    again.load_state_dict(torch.load(tmp_path / "averaged.pt"))
    ids = IDS[:, :4]
    assert torch.equal(generated(again.module.eval(), ids), generated(averaged.module.eval(), ids))


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_trainer_with_frozen_weights(reentrant: bool, tmp_path: Path) -> None:
    model = make("every")
    for module in (model.model.embed_tokens, *model.model.layers[:9]):
        module.requires_grad_(False)
    want = copy.deepcopy(model)
    own_loop(want)
    trainer(model, tmp_path, **checkpointed(reentrant)).train()
    assert_same_weights(model, want)


def _loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / (
        num_items_in_batch
    )


class Generates(TrainerCallback):
    def on_step_end(self, *args: Any, model: Any, **_: Any) -> None:
        assert model.training
        generated(model, IDS[:, :4])
        model.eval()
        generated(model, IDS[:, :4])
        model.train()


@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [{"compute_loss_func": _loss}, {"callbacks": [Generates()]}],
    ids=["loss", "generates"],
)
def test_trainer_with_a_users_function(others: dict[str, Any], tmp_path: Path) -> None:
    model = make("every")
    trainer(model, tmp_path, "left", others, **checkpointed(False)).train()
    assert_same_weights(model, wanted("every", 0.0)[0])


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adafactor", "adamw_torch_fused", "rmsprop", "adagrad"])
def test_trainer_with_an_optimizer(optim: str, tmp_path: Path) -> None:
    options = {"optim": optim, "learning_rate": 1e-2, "neftune_noise_alpha": 1.0}
    run = trainer(
        make("every"), tmp_path, "left", train_sampling_strategy="group_by_length", **options
    )
    run.train()
    assert len(losses(run)) == 3 and all(0 < x < 6 for x in losses(run))


@pytest.mark.slow
def test_trainer_with_a_larger_vocabulary(tmp_path: Path) -> None:
    model = make("every")
    model.resize_token_embeddings(40)
    trainer(model, tmp_path, save_strategy="steps", save_steps=3).train()
    again = SlipstreamForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    assert again.lm_head.weight.shape == (40, 16)
    with torch.no_grad():
        ids = torch.tensor([[39, 1, 2]])
        assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)


@pytest.mark.slow
def test_trainer_makes_the_model_itself(tmp_path: Path) -> None:
    run = Trainer(
        model_init=lambda: make("every"),
        args=arguments(tmp_path),
        train_dataset=rows(),
        data_collator=Padded(),
    )
    run.train()
    assert_same_weights(run.model, wanted("every", 0.0)[0])


@pytest.mark.slow
def test_loss_of_rows_is_the_loss_of_each() -> None:
    """The loop above relies on this."""
    model = make("every").eval()
    data = rows()[:4]
    count = sum(len(x["input_ids"]) - 1 for x in data)
    want = sum(float(row_loss(model, x["input_ids"]).detach()) for x in data) / count
    for side in ("left", "right"):
        found = float(model(**Padded(side)(data)).loss.detach())
        assert found == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_trainer_takes_batches_without_labels(accumulated: int, tmp_path: Path) -> None:
    """Such as prompts that are longer than the cut: a step of them leaves the weights alone."""
    model, data = make("gla"), rows()
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
