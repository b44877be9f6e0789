"""What compiles a model's kernels before its first step leaves no trace but compiled kernels."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM, first_step


def small(*mixers: str) -> Any:
    torch.manual_seed(0)
    config = SlipstreamConfig(vocab_size=50, hidden_size=32, num_heads=2, mixers=[*mixers])
    return SlipstreamForCausalLM(config).train()


def launches(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of which blocks compile_once runs forward and backward, with launches as they are."""
    seen: list[int] = []

    def compile_kernels(call: Any, args: Any) -> None:
        for i, block in enumerate(model.model.layers):

            def record(*given: Any, i: int = i, block: Any = block, **named: Any) -> Any:
                seen.append(i)
                return type(block).forward(block, *given, **named)

            monkeypatch.setitem(block.__dict__, "forward", record)
        call(*args)
        for block in model.model.layers:
            monkeypatch.delitem(block.__dict__, "forward")

    monkeypatch.setattr(first_step, "compile_kernels", compile_kernels)
    h = torch.randn(2, 20, 32)
    state = torch.get_rng_state()
    for _ in range(2):
        first_step.compile_once(model.model, h, None, None)
    assert torch.equal(torch.get_rng_state(), state)
    return seen


@pytest.mark.parametrize(
    ("mixers", "blocks"),
    [
        (("kda", "kda", "attention", "kda", "attention"), [0, 1, 2]),
        (("rwkv7", "rwkv7", "rwkv7"), [0, 1]),
    ],
)
def test_each_kind_of_block_runs_once(
    mixers: tuple[str, ...], blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(*mixers)
    assert launches(model, monkeypatch) == blocks
    assert all(p.grad is None for p in model.parameters())


def test_hooked_blocks_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("gla", "kda")
    called: list[Any] = []
    model.model.layers[0].mlp.register_forward_hook(lambda *args: called.append(args))
    assert launches(model, monkeypatch) == [1]
    assert not called


def test_tables_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.nn import decoding

    calls: list[Any] = []
    tables = decoding.rotary_tables

    def counted(*args: Any, **named: Any) -> Any:
        calls.append(args)
        return tables(*args, **named)

    monkeypatch.setattr(decoding, "rotary_tables", counted)
    model, ids = small("attention", "attention", "attention"), torch.randint(0, 50, (2, 20))
    loss = model(input_ids=ids, labels=ids).loss
    assert len(calls) == 1
    first = model.model.layers[0].mixer(torch.randn(2, 20, 32))[0]
    assert len(calls) == 2
    assert loss.isfinite() and first.isfinite().all()


def test_blocks_with_hooked_parameters_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("gla", "kda")
    called: list[Any] = []
    model.model.layers[1].mixer.o_proj.weight.register_hook(called.append)
    assert launches(model, monkeypatch) == [0]
    assert not called


def test_replicas_of_data_parallel_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("gla")
    calls: list[Any] = []
    monkeypatch.setattr(first_step, "compile_kernels", lambda *args: calls.append(args))
    replica = model.model._replicate_for_data_parallel()
    first_step.compile_once(replica, torch.randn(2, 20, 32), None, None)
    assert not calls
    first_step.compile_once(model.model, torch.randn(2, 20, 32), None, None)
    assert len(calls) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_loss_is_compiled_beside_blocks(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small("gla"), torch.randint(0, 50, (2, 20))
    losses: list[Any] = []
    plain = model._loss

    def counted(h: Any, target: Any, num_items: Any) -> Any:
        losses.append((h.shape, target.shape, h.requires_grad))
        return plain(h, target, num_items)

    model._loss = counted

    def forward_of(inner: Any, h: Any, *args: Any, **named: Any) -> Any:
        first_step.compile_once(inner, h, None, None)
        return nullcontext()

    monkeypatch.setattr(first_step, "compile_kernels", lambda call, args: call(*args))
    monkeypatch.setattr("slipstream.models.model.forward_of", forward_of)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, 15:] = 0
    loss = model(input_ids=ids, labels=ids, attention_mask=mask if packed else None).loss
    loss.backward()
    rows = (1, 35) if packed else (2, 20)
    assert losses[0] == ((*rows, 32), rows, True) and len(losses) == 2
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    again = model(input_ids=ids, labels=ids, attention_mask=mask if packed else None).loss
    again.backward()
    assert len(losses) == 3 and torch.equal(loss, again)
    assert all(map(torch.equal, grads, (p.grad for p in model.parameters())))
    # of a head with hooks nothing is known
    model.lm_head.register_forward_hook(lambda *args: None)
    assert first_step.loss_of(model, ids, None) is None
    assert first_step.loss_of(small("gla"), None, None) is None


def test_fake_tensors_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("gla").model
    calls: list[Any] = []
    monkeypatch.setattr(first_step, "compile_once", lambda *args: calls.append(args))
    with FakeTensorMode():
        h = torch.empty(2, 20, 32, device="cuda")
        with first_step.forward_of(model, h, None, None, alone=True):
            assert not calls
