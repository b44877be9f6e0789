"""accelerate's own loop on a model with a layer of every mixer: the losses and weights of a plain
one, in one process and in two."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.processes import in_processes
from tests.support.trainer_runs import IDS, VOCAB, assert_same_weights, generated, make

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
accelerate = pytest.importorskip("accelerate")


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(1, VOCAB, (9,), generator=generator) for _ in range(16)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def plain(model: nn.Module) -> list[float]:
    """Two batches of two rows a step."""
    optimizer, data, found = sgd(model), rows(), []
    for i in range(0, 16, 2):
        ids = torch.stack(data[i : i + 2])
        loss = model(input_ids=ids, labels=ids).loss
        (loss / 2).backward()
        found.append(loss.item())
        if i % 4:
            optimizer.step()
            optimizer.zero_grad()
    return found


def prepared(batch: int = 2, **options: Any) -> tuple[Any, Any, Any, Any]:
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    if "fsdp_plugin" in options:  # which it asks for on an accelerator only
        for state in (accelerator.state, accelerate.state.PartialState()):
            state._shared_state["distributed_type"] = accelerate.DistributedType.FSDP
        accelerator.state._shared_state["fsdp_plugin"] = options["fsdp_plugin"]
    model = make("every").train()
    return accelerator, *accelerator.prepare(
        model, sgd(model), DataLoader(rows(), batch_size=batch)
    )


def steps(accelerator: Any, model: Any, optimizer: Any, batches: Any) -> list[float]:
    found = []
    for ids in batches:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
        found.append(float(accelerator.gather_for_metrics(loss.detach()[None]).mean()))
    return found


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_loop_is_the_plain_one(precision: str, tmp_path: Path) -> None:
    want = make("every").train()
    losses = plain(want)
    accelerator, model, optimizer, loader = prepared(mixed_precision=precision)
    found = steps(accelerator, model, optimizer, loader)
    assert found == pytest.approx(losses, rel=1e-3 if precision == "no" else 3e-2)
    plain_model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert generated(plain_model.eval(), IDS[:, :4]).shape == (2, 7)
    if precision == "no":
        assert_same_weights(plain_model, want)
        accelerator.save_model(model, tmp_path)
        again = make("every")
        accelerate.load_checkpoint_in_model(again, tmp_path)
        assert_same_weights(again, want)


def test_state_is_saved_and_loaded(tmp_path: Path) -> None:
    want = make("every").train()
    plain(want)
    accelerator, model, optimizer, loader = prepared()
    steps(accelerator, model, optimizer, list(loader)[:4])
    accelerator.save_state(str(tmp_path))
    accelerator, model, optimizer, loader = prepared()
    accelerator.load_state(str(tmp_path))
    steps(accelerator, model, optimizer, accelerator.skip_first_batches(loader, 4))
    assert_same_weights(accelerator.unwrap_model(model), want)


def _plugin(**options: Any) -> Any:
    return accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type="SHARDED_STATE_DICT",
        **options,
    )


def _in_process(rank: int, folder: str, way: str, found: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    options: dict[str, Any] = {"mixed_precision": "bf16" if "bf16" in way else "no"}
    if way.startswith("ddp"):
        handler = accelerate.DistributedDataParallelKwargs(find_unused_parameters=True)
        options["kwargs_handlers"] = [handler]
    else:
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        options["fsdp_plugin"] = _plugin(activation_checkpointing="checkpointed" in way)
    accelerator, model, optimizer, loader = prepared(1, **options)
    assert type(model).__name__.startswith(("FSDP", "DistributedDataParallel"))
    batches = list(loader)
    losses = steps(accelerator, model, optimizer, batches[:4])
    accelerator.save_state(folder)
    losses += steps(accelerator, model, optimizer, batches[4:])
    whole = [accelerator.get_state_dict(model)]
    accelerator.load_state(folder)
    steps(accelerator, model, optimizer, accelerator.skip_first_batches(loader, 4))
    whole.append(accelerator.get_state_dict(model))
    if rank == 0:
        torch.save((losses, whole), Path(folder) / "found.pt")


@pytest.mark.parametrize("way", ["ddp", "ddp bf16", "fsdp2", "fsdp2 checkpointed", "fsdp2 bf16"])
def test_two_processes_are_the_plain_loop(way: str, tmp_path: Path) -> None:
    in_processes(2, tmp_path, _in_process, str(tmp_path), way)
    found, whole = torch.load(tmp_path / "found.pt")
    want = make("every").train()
    rounded = "bf16" in way
    assert found == pytest.approx(plain(want), rel=3e-2 if rounded else 1e-3)
    for state in [] if rounded else whole:
        again = make("every")
        again.load_state_dict({n: x.float().cpu() for n, x in state.items()}, strict=False)
        assert_same_weights(again, want)
