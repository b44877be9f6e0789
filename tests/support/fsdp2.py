"""Models sharded by FSDP2 against whole ones."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream.layers import Mixer
from slipstream.models import MIXERS as NAMES
from slipstream.models import SlipstreamForCausalLM
from tests.support.language_models import LAYERS, small_model

VOCAB, RANKS = 53, 2

MIXERS: list[Any] = ["gated_deltanet", "rwkv7", LAYERS["mla"], "rwkv7"]

# the options of mla are not its defaults
EVERY_MIXER = [*MIXERS, *(name for name in NAMES if name not in ("gated_deltanet", "rwkv7", "mla"))]


def units(model: SlipstreamForCausalLM, which: str) -> list[Any]:
    """The modules that become units, inner ones first; a list is one unit."""
    m, layers = model.model, list(model.model.layers)
    if which == "tied":
        return [*layers, [m.embed_tokens, model.lm_head]]
    choices: dict[str, list[Any]] = {
        "root": [],
        "blocks": layers,
        "ends": [m.embed_tokens, m.norm, model.lm_head],
        "mixers": [x for x in model.modules() if isinstance(x, Mixer)],
        # every module that has parameters
        "everything": [
            x
            for x in reversed(list(model.modules()))
            if any(True for _ in x.parameters()) and not isinstance(x, nn.ModuleList)
        ][:-1],
    }
    return choices[which]


def make(which: str, mixers: list[Any]) -> SlipstreamForCausalLM:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "intermediate_size": 24}
    options = {"initializer_range": 0.2, "tie_word_embeddings": which == "tied"}
    return small_model(mixers, **sizes, **options).train()


def loss_of(model: SlipstreamForCausalLM, ids: torch.Tensor, reentrant: bool | None) -> Any:
    if reentrant is not None:
        word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
        options = {f"{word}_checkpointing_kwargs": {"use_reentrant": reentrant}}
        getattr(model, f"{word}_checkpointing_enable")(**options)
    return model(ids, labels=ids).loss


def compare(
    cases: list[tuple[str, bool | None]],
    mixers: list[Any],
    device: str = "cpu",
    rtol: float = 1e-3,
    atol: float = 1e-5,
) -> None:
    """Loss and gradients of the sharded model against those of the whole one."""
    from torch.distributed.fsdp import fully_shard

    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh(device, (ranks,))
    batches = torch.arange(ranks * 9).mul(7).remainder(VOCAB).view(ranks, 1, 9).to(device)
    for which, reentrant in cases:
        whole, sharded = (make(which, mixers).to(device) for _ in range(2))
        for unit in units(sharded, which):
            fully_shard(unit, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        # FSDP's gradient is the mean over the processes
        losses = [loss_of(whole, ids, None) for ids in batches]
        (sum(losses) / ranks).backward()
        loss = loss_of(sharded, batches[rank], reentrant)
        loss.backward()
        torch.testing.assert_close(loss, losses[rank], rtol=rtol, atol=atol)
        for (name, p), q in zip(sharded.named_parameters(), whole.parameters(), strict=True):
            label = f"units {which}, reentrant {reentrant}, {name}: "
            assert (p.grad is None) == (q.grad is None), label
            if p.grad is not None:
                torch.testing.assert_close(
                    p.grad.full_tensor(),
                    q.grad,
                    rtol=rtol,
                    atol=atol,
                    msg=lambda text, label=label: label + text,
                )
