"""A block that is played from a record does what the block would have done, on a CPU."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM, played
from slipstream.nn import RMSNorm
from slipstream.runtime import backends, call_replay, parallel_compile
from slipstream.runtime.consistent import consistent
from slipstream.runtime.context_exchange import HeadShard
from tests.support import wants

pytestmark = wants.triton
LENGTHS = (20, 20, 33, 20, 47, 33)  # in chunks


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each block's forward was played."""
    found: list[bool] = []
    forwards, plain = played._Forwards(), played.play

    def play(*args: Any) -> Any:
        result = plain(*args)
        found.append(result is not played.MISS)
        return result

    monkeypatch.setattr(played, "_FORWARDS", forwards)
    monkeypatch.setattr(played, "play", play)
    monkeypatch.setattr(call_replay, "is_enabled", lambda x: True)
    monkeypatch.setattr(backends, "INTERPRETED", False)
    monkeypatch.setattr(parallel_compile, "compile_kernels", lambda call, args: None)
    return found


def model_of(*mixers: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_heads": 2, "vocab_size": 50, "intermediate_size": 48}
    return SlipstreamForCausalLM(SlipstreamConfig(mixers=[*mixers], **sizes, **options)).eval()


def run(model: Any, ids: Tensor, **options: Any) -> list[Tensor]:
    out = model(input_ids=ids, **{"use_cache": True, **options})
    states = out.past_key_values.layers if out.past_key_values is not None else []
    return [out.logits, *(x for layer in states for x in layer.state.values())]


def agree(
    model: Any, monkeypatch: pytest.MonkeyPatch, lengths: Any = LENGTHS, **options: Any
) -> None:
    for n in lengths:
        ids = torch.randint(1, 50, (2, n))
        with torch.no_grad():
            got = run(model, ids, **options)
            with monkeypatch.context() as context:
                context.setattr(call_replay, "is_enabled", lambda x: False)
                want = run(model, ids, **options)
        assert len(got) == len(want)
        assert all(map(torch.equal, got, want))


def number_of_kinds() -> int:
    keys = [x for key in played._FORWARDS._known if key is not None for x in key]
    return len({x for x in keys if isinstance(x, played._Kind)})


KINDS = {
    "attention": (["attention"] * 3, 1),
    "retention": (["retention"] * 3, 1),
    "kda": (["kda"] * 3, 1),
    "mamba2": (["mamba2"] * 3, 1),
    "rwkv7": (["rwkv7"] * 4, 2),  # the first gives the others its values
    "two kinds": (["gla", "attention", "gla", "attention"], 2),
    "of a layer": ([{"type": "lightning_attn", "num_layers": 3}] * 3, 3),
}


@pytest.mark.parametrize("name", KINDS)
def test_played_blocks_give_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch, counted: list[bool]
) -> None:
    mixers, kinds = KINDS[name]
    model = model_of(*mixers)
    agree(model, monkeypatch)
    agree(model, monkeypatch, use_cache=False)
    agree(model, monkeypatch, lengths=(33, 20))
    assert number_of_kinds() == kinds
    in_turn = counted[-2 * len(mixers) : -len(mixers)]
    assert all(in_turn)
    # the sizes of both ways: with the padding of a chunk and without
    assert all(len(x.records) <= 2 for x in played._FORWARDS._known.values())


def replace_weight(model: Any) -> None:
    model.model.layers[1].mixer.o_proj.weight = nn.Parameter(torch.randn(32, 32))


def change_weight(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mixer.o_proj.weight.mul_(2)


def replace_module(model: Any) -> None:
    norm = model.model.layers[1].mlp_norm = RMSNorm(32)
    nn.init.constant_(norm.weight, 3.0)


def change_option(model: Any) -> None:
    model.model.layers[1].mixer_norm.eps = 0.5


def scale(module: nn.Module, args: tuple, y: Tensor) -> Tensor:
    return 2 * y


def hook(model: Any) -> None:
    model.model.layers[1].mixer.o_proj.register_forward_hook(scale)


def replace_forward(model: Any) -> None:
    layer = model.model.layers[1].mixer.o_proj
    plain = layer.forward
    layer.forward = lambda x: 3 * plain(x)


def add_bias(model: Any) -> None:
    model.model.layers[1].mixer.o_proj.bias = nn.Parameter(torch.ones(32))


def share_weight(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.up_proj.weight = mlp.gate_proj.weight


def widen(model: Any) -> None:
    model.double()


def parametrize(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.model.layers[1].mixer.o_proj)
    model.model.layers[1].mixer.o_proj.parametrizations.weight.original0.data.mul_(2)


def hook_everything(model: Any) -> Any:
    return nn.modules.module.register_module_forward_hook(
        lambda module, args, y: 2 * y if type(module) is RMSNorm else None
    )


CHANGES = [
    *(replace_weight, change_weight, replace_module, change_option, hook, replace_forward),
    *(add_bias, share_weight, widen, parametrize, hook_everything),
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_block_is_not_played_as_it_was(
    change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, counted: list[bool]
) -> None:
    model = model_of("attention", "attention")
    agree(model, monkeypatch)
    assert counted[-3]
    ids = torch.randint(1, 50, (2, 20))
    with torch.no_grad():
        before = run(model, ids)[0]
    handle = change(model)
    try:
        agree(model, monkeypatch, lengths=(20, 20, 20, 33))
        with torch.no_grad():
            after = run(model, ids)[0]
    finally:
        if handle is not None:
            handle.remove()
    assert (before - after).abs().max() > 1e-3 or change is widen


def test_shared_weight_is_no_argument_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of blocks in which two layers have one weight would take one of them for both."""
    model = model_of("attention", "attention")
    for layer in model.model.layers:
        layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight
    agree(model, monkeypatch)
    for layer in model.model.layers:
        layer.mlp.up_proj.weight = nn.Parameter(torch.randn(48, 32))
    agree(model, monkeypatch)


def test_other_model_of_the_kind_has_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("retention", "retention")
    agree(model, monkeypatch)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.01)
    agree(other, monkeypatch, lengths=(20, 33))
    agree(model, monkeypatch, lengths=(20, 33))
    assert number_of_kinds() == 1
    seen = weakref.ref(model.model.layers[0].mlp.gate_proj.weight)
    del model
    gc.collect()
    assert seen() is None


def test_calls_that_are_more_than_a_forward_are_made(
    monkeypatch: pytest.MonkeyPatch, counted: list[bool]
) -> None:
    """With gradients, in training, in autocast, in a scope, with a state, packed, of no tokens."""
    model = model_of("retention", "retention")
    agree(model, monkeypatch)
    ids = torch.randint(1, 50, (2, 20))
    counted.clear()
    model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=ids)
        with consistent():
            model(input_ids=ids)
        with torch.device("cpu"):  # a mode that is to see each operation
            model(input_ids=ids)
        cache = model(input_ids=ids[:0]).past_key_values
        model.train()(input_ids=ids)
        model.eval()
        assert not any(counted)
        before = len(counted)
        cache = model(input_ids=ids, use_cache=True).past_key_values
        assert all(counted[before:])
        before = len(counted)
        model(input_ids=ids[:, :1], past_key_values=cache)
        model(input_ids=ids[:1], cu_seqlens=torch.tensor([0, 4, 20], dtype=torch.int32))
        assert len(counted) == before
        model.model.layers[0].mixer.head_shard = HeadShard(object(), 0, 1)
        assert played._Seen(model.model.layers[0]).kind is None  # it talks to other ranks
        assert played._Seen(model.model.layers[1]).kind is not None
    assert all(p.grad is not None for p in model.parameters())
