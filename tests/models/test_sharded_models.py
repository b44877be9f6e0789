"""Tensor parallelism by heads, and FSDP2, of which any module may be a unit: processes on a CPU
beside one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slipstream.layers import Attention, GatedDeltaNet, Mamba2
from slipstream.models import (
    MIXERS,
    SlipstreamConfig,
    SlipstreamForCausalLM,
    shard_heads,
    tensor_parallel,
)
from slipstream.models.head_layouts import heads_of
from tests.support import fsdp2, wants
from tests.support.fsdp2 import EVERY_MIXER, RANKS, compare, make
from tests.support.language_models import INDEXED
from tests.support.processes import in_processes, own_group
from tests.support.tensor_runs import DEFAULT, FOUR, TWO, run_cases

pytestmark = wants.collectives


def test_two_processes_equal_one(tmp_path: Path) -> None:
    """Losses, gradients, logits and tokens; with FSDP2 around."""
    in_processes(2, tmp_path, run_cases, DEFAULT, tmp_path)


@pytest.mark.slow
def test_checkpoint_that_transformers_deals_out(tmp_path: Path) -> None:
    in_processes(2, tmp_path, run_cases, [], tmp_path)


@pytest.mark.slow
def test_every_mixer_on_two_processes(tmp_path: Path) -> None:
    in_processes(2, tmp_path, run_cases, TWO, tmp_path)


@pytest.mark.slow
def test_four_processes_equal_one(tmp_path: Path) -> None:
    """With FSDP2 and context parallelism beside."""
    in_processes(4, tmp_path, run_cases, FOUR, tmp_path)


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_parameter_with_heads_is_sharded(mixer: str) -> None:
    """Parameters that stay whole are small: ranks of gates, norms of a head, mixes of tokens."""
    config = SlipstreamConfig(mixers=[mixer], hidden_size=256, num_heads=4)
    layer: Any = SlipstreamForCausalLM(config).model.layers[0].mixer
    if mixer in INDEXED:
        with pytest.raises(NotImplementedError, match=r"^[DQM]SA: its indexer's heads"):
            heads_of(layer, 2)
        return
    heads = heads_of(layer, 2)
    assert heads is not None
    named = dict(layer.named_parameters())
    for name, layout in heads.layouts.items():
        if name in named:
            assert named[name].shape[layout.dim] == sum(layout.blocks), name
    layer.requires_grad_(False)
    whole = sum(p.numel() for name, p in named.items() if name not in heads.layouts)
    share = whole / sum(p.numel() for p in named.values())
    # of mla the latents of all heads, of rwkv and the others their low-rank gates
    limit = 0.75 if mixer == "mla" else 0.45
    assert share < limit, (mixer, share)


def test_heads_that_are_no_multiple_are_named() -> None:
    with pytest.raises(ValueError, match="GatedDeltaNet: num_heads: want a multiple of 2 ranks"):
        heads_of(GatedDeltaNet(24, 3), 2)
    with pytest.raises(ValueError, match="Attention: num_kv_heads: want a multiple of 2 ranks"):
        heads_of(Attention(16, 4, 1), 2)
    with pytest.raises(ValueError, match="n_groups: want 1 or a multiple of 4 ranks, got 2"):
        heads_of(Mamba2(16, 4, n_groups=2), 4)


@own_group()
def test_nothing_changes_where_a_layer_is_refused() -> None:
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="mesh: want one dimension, got 2"):
        shard_heads(model, mesh)
    with pytest.raises(TypeError, match="mesh: want a DeviceMesh, got str"):
        shard_heads(model, "cpu")  # pyright: ignore[reportArgumentType]
    assert type(model.weight) is torch.nn.Parameter
    layer = shard_heads(GatedDeltaNet(16, 2), mesh["a"])
    with pytest.raises(ValueError, match="model: is already sharded"):
        shard_heads(layer, mesh["a"])


def test_head_with_a_bias_is_sharded() -> None:
    config = SlipstreamConfig(vocab_size=6, hidden_size=8, mixers=["gated_deltanet"])
    model: Any = SlipstreamForCausalLM(config)
    model.lm_head = torch.nn.Linear(8, 6)
    ids = torch.tensor([[1, 5, 2]])
    want = model(ids, labels=ids)
    with own_group():
        shard_heads(model, dist.init_device_mesh("cpu", (1,)))
        got = model(ids, labels=ids)
        torch.testing.assert_close(got.logits, want.logits)
        torch.testing.assert_close(got.loss, want.loss)
        got.loss.backward()
        assert model.lm_head.bias.grad.full_tensor().abs().sum() > 0


def test_parameter_with_two_names_is_dealt_under_both() -> None:
    module: Any = torch.nn.Linear(2, 2)
    module.tied = module.weight
    assert [name for name, _ in tensor_parallel._own(module)] == ["weight", "bias", "tied"]


def test_sums_over_ranks_have_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a bias behind the sum over ranks."""
    module: Any = torch.nn.Linear(2, 2)
    monkeypatch.setattr(tensor_parallel, "_local_part", lambda parameter, _: parameter)
    own = [("weight", 1.0), ("bias", 0.5)]
    of_ranks = [tensor_parallel._Parameter(module, n, (n,), 0, scale) for n, scale in own]
    weight, bias = module.weight, module.bias
    with tensor_parallel._local(of_ranks, None):
        assert module.weight is weight and torch.equal(module.bias, bias / 2)
    assert module.bias is bias


def in_process(
    rank: int, cases: list[tuple[str, bool | None]], mixers: list, found: object
) -> None:
    compare(cases, mixers)


# of linear layers with a bias, torch's own among them
@pytest.mark.filterwarnings("ignore:.*returned a view tensor:UserWarning")
@pytest.mark.parametrize("which", ["blocks", "ends", "mixers", "tied", "everything"])
@own_group()
def test_model_sharded_over_one_process(which: str) -> None:
    """Its parameters are DTensors all the same."""
    compare([(which, None)], EVERY_MIXER if which == "everything" else fsdp2.MIXERS)


# torch says so of every random number of a DTensor on the CPU
@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
def test_shards_from_the_meta_device_are_initialised() -> None:
    from torch.distributed.fsdp import fully_shard

    with own_group():
        whole = make("root", EVERY_MIXER)
        with torch.device("meta"):
            sharded = SlipstreamForCausalLM(whole.config)
        fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (1,)))
        sharded.to_empty(device="cpu")
        with torch.no_grad():
            for p in sharded.parameters():
                p.fill_(torch.nan)
        sharded.init_weights()
        for (name, p), q in zip(sharded.named_parameters(), whole.parameters(), strict=True):
            shard = p.full_tensor()
            assert shard.isfinite().all(), name
            assert (shard.std() == 0) == (q.std() == 0), name


@pytest.mark.slow
def test_model_sharded_over_two_processes(tmp_path: Path) -> None:
    choices = ("root", "blocks", "ends", "mixers", "tied", "everything")
    cases = [(which, reentrant) for which in choices for reentrant in (None, True, False)]
    in_processes(RANKS, tmp_path, in_process, cases, EVERY_MIXER)
