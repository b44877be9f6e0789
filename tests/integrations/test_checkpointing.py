"""Packed sequences in patched models whose layers run again in the backward pass; these under DDP
and FSDP2, where two processes have the gradients of one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support import wants
from tests.support.processes import in_processes
from tests.support.transformers_context import make

pytest.importorskip("transformers")

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from slipstream.integrations.transformers import NAME, patch, unpatch
from tests.support.linear_models import alone, linear_classes, packed_inputs, tiny
from tests.support.processes import own_group
from tests.support.tiny_models import build, difference

pytestmark = pytest.mark.filterwarnings("ignore")
TOLD = ("position_ids", "seq_idx", "offsets")
SAMPLE = ("Mamba2ForCausalLM", "Qwen3NextForCausalLM")


def _layers(model: nn.Module) -> list[nn.Module]:
    return [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]


def _parts(model: nn.Module) -> list[nn.Module]:
    return [part for layer in _layers(model) for part in layer.children()]


def _wrap(model: nn.Module, modules: list[nn.Module], wrapper: Callable) -> None:
    chosen = {id(x) for x in modules}
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda x: id(x) in chosen
    )


def _wrapper(impl: CheckpointImpl) -> Callable:
    return partial(checkpoint_wrapper, checkpoint_impl=impl)


def _by_hand(model: nn.Module, use_reentrant: bool) -> None:
    """A function of the trainer's in place of forward, which has the arguments of a layer alone."""
    for layer in _layers(model):
        forward = layer.forward

        def again(x: Tensor, *args: Any, forward: Callable = forward, **kwargs: Any) -> Any:
            call = partial(forward, **kwargs)
            return checkpoint(call, x, *args, use_reentrant=use_reentrant)

        layer.forward = again


def _enable(model: Any, use_reentrant: bool) -> None:
    options = {"use_reentrant": use_reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _sharded(model: nn.Module, impl: CheckpointImpl) -> None:
    """As accelerate and torchtitan do it: FSDP2 around layers with checkpoints."""
    _wrap(model, _layers(model), _wrapper(impl))
    for layer in _layers(model):
        fully_shard(layer)
    fully_shard(model)


def _nested(model: nn.Module, impl: CheckpointImpl) -> None:
    """As accelerate wraps Mamba, whose _no_split_modules are layers and mixers."""
    _wrap(model, _parts(model), _wrapper(impl))
    _wrap(model, _layers(model), _wrapper(impl))


WAYS: dict[str, Callable[[Any], None]] = {
    "reentrant": lambda m: _wrap(m, _layers(m), _wrapper(CheckpointImpl.REENTRANT)),
    "not reentrant": lambda m: _wrap(m, _layers(m), _wrapper(CheckpointImpl.NO_REENTRANT)),
    "parts, reentrant": lambda m: _wrap(m, _parts(m), _wrapper(CheckpointImpl.REENTRANT)),
    "parts, not reentrant": lambda m: _wrap(m, _parts(m), _wrapper(CheckpointImpl.NO_REENTRANT)),
    "nested, not reentrant": lambda m: _nested(m, CheckpointImpl.NO_REENTRANT),
    "sharded, reentrant": lambda m: _sharded(m, CheckpointImpl.REENTRANT),
    "sharded, not reentrant": lambda m: _sharded(m, CheckpointImpl.NO_REENTRANT),
    "by hand, reentrant": lambda m: _by_hand(m, True),
    "by hand, not reentrant": lambda m: _by_hand(m, False),
    "enabled, reentrant": lambda m: _enable(m, True),
    "enabled, not reentrant": lambda m: _enable(m, False),
}


def gradients(model: Any, run: Callable[[], Tensor]) -> dict[str, dict[str, Tensor]]:
    """By backward(), which is what reentrant checkpoints take."""
    model.zero_grad()
    logits = run()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    (logits.float() * weights).sum().backward()
    found = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            found[name.replace("_checkpoint_wrapped_module.", "")] = grad.clone()
    return {"backward": found}


def assert_apart(name: str, told: str, way: str) -> None:
    cls, config, weights, inputs, _ = tiny(name)
    ids = inputs["input_ids"]
    patch()
    model = build(cls, config, NAME, weights).train()
    want = gradients(model, lambda: alone(model, ids))
    WAYS[way](model)
    given = packed_inputs(told, ids)
    got = gradients(model, lambda: model(**given, use_cache=False).logits)
    assert got["backward"].keys() == want["backward"].keys()
    assert difference(got, want) == ""


@own_group()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SAMPLE)
def test_layers_that_run_again_keep_sequences_apart(name: str, way: str) -> None:
    assert_apart(name, "position_ids", way)


@pytest.mark.slow
@own_group()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("name", linear_classes())
def test_every_model_keeps_sequences_apart(name: str, told: str, way: str) -> None:
    assert_apart(name, told, way)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_enabled_checkpoints_run_layers_again(use_reentrant: bool) -> None:
    """Newer transformers checkpoint no layer whose forward has another around it."""
    cls, config, weights, inputs, _ = tiny("Mamba2ForCausalLM")
    patch()
    model = build(cls, config, NAME, weights).train()
    _enable(model, use_reentrant)
    runs: list[Any] = []
    for layer in model.backbone.layers:
        layer.norm.register_forward_hook(lambda *call: runs.append(call[0]))
    gradients(model, lambda: model(inputs["input_ids"], use_cache=False).logits)
    assert len(runs) == 2 * config.num_hidden_layers


@pytest.mark.parametrize("way", ["reentrant", "parts, not reentrant"])
def test_each_call_has_its_own_sequences(way: str) -> None:
    """Of two forward passes before the backward, and of a layer that is called by hand between."""
    cls, config, weights, inputs, _ = tiny("Mamba2ForCausalLM")
    ids = inputs["input_ids"]
    patch()
    model = build(cls, config, NAME, weights).train()
    want = gradients(model, lambda: torch.cat([alone(model, ids), model(ids).logits]))
    x = torch.randn(2, ids.shape[1], config.hidden_size)
    plain = model.backbone.layers[0](x)
    WAYS[way](model)

    def both() -> Tensor:
        packed = model(**packed_inputs("position_ids", ids)).logits
        assert torch.equal(model.backbone.layers[0](x), plain)
        return torch.cat([packed, model(ids).logits])

    assert difference(gradients(model, both), want) == ""


def test_checkpoints_are_put_back() -> None:
    def around() -> list[Any]:
        classes = torch.utils.checkpoint.CheckpointFunction, torch.utils.checkpoint._CheckpointFrame
        return [vars(classes[0])["forward"], vars(classes[1])["__init__"]]

    before = around()
    patch()
    assert not any(x is y for x, y in zip(around(), before))
    unpatch()
    assert all(x is y for x, y in zip(around(), before))


NAMES = ("Qwen3Next", "Llama", "KimiLinear", "Mamba2", "Bamba")
PARALLEL = ("ddp", "fsdp2 checkpointed", "ddp checkpointed", "fsdp2", "ddp compiled")


def wrapped(model: Any, way: str) -> nn.Module:
    if "checkpointed" in way:
        # the method has another name before transformers 5.20
        word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
        getattr(model, f"{word}_checkpointing_enable")({"use_reentrant": False})
    if way.startswith("fsdp2"):
        for layer in model.base_model.layers:
            fully_shard(layer)
        return fully_shard(model)
    # an expert may have no token
    call: Any = DistributedDataParallel(model, find_unused_parameters=way == "ddp")
    return torch.compile(call, backend="aot_eager") if "compiled" in way else call


def loss_of(call: Any, ids: Tensor) -> Tensor:
    return call(input_ids=ids, labels=ids, use_cache=False).loss


def compare(rank: int, names: tuple[str, ...], ways: tuple[str, ...], found: Any) -> None:
    ids = torch.randint(5, 50, (2, 24), generator=torch.Generator().manual_seed(0))
    for name in names:
        for way in ways:
            whole, part = (make(f"{name}ForCausalLM") for _ in range(2))
            part.load_state_dict(whole.state_dict())
            torch.stack([loss_of(whole, row[None]) for row in ids]).mean().backward()
            call = wrapped(part, way)  # DDP's backward wants the module alive
            loss_of(call, ids[rank : rank + 1]).backward()
            largest = max(
                float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None
            )
            for (n, p), q in zip(part.named_parameters(), whole.parameters(), strict=True):
                if q.grad is None:
                    continue
                grad: Any = torch.zeros_like(p) if p.grad is None else p.grad
                grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                off = float((grad - q.grad).detach().abs().max())
                if not off < 1e-5 * largest:
                    found.put(f"{name}, {way}: {n} is off by {off:.1e} of {largest:.1e}")
    found.put("done")


@wants.collectives
def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    assert in_processes(2, tmp_path, compare, NAMES[:1], PARALLEL[:2]) == ["done"] * 2


@wants.collectives
@pytest.mark.slow
def test_every_type_in_every_way(tmp_path: Path) -> None:
    assert in_processes(2, tmp_path, compare, NAMES, PARALLEL) == ["done"] * 2
