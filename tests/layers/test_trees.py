"""Layers and models of prefix trees are those of each path by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from tests.support.prefix_trees import LENGTHS, PARENTS, leaves, offsets, path_of
from tests.support.small_layers import OPTIONS, D, make


@pytest.mark.parametrize("name", OPTIONS)
def test_layer_of_a_tree_is_that_of_its_paths(name: str) -> None:
    torch.manual_seed(0)
    layer: Any = make(name).double()
    x = torch.randn(1, sum(LENGTHS), D, dtype=torch.float64, requires_grad=True)
    if hasattr(layer, "index_proj"):
        with pytest.raises(NotImplementedError, match=r"^context, parents: "):
            layer(x, cu_seqlens=offsets(), parents=torch.tensor(PARENTS))
        return
    made: list[StorageWeakRef] = []
    if name == "Attention":
        note = lambda *call: made.append(StorageWeakRef(call[-1].untyped_storage()))  # noqa: E731
        layer.qkv_proj.register_forward_hook(note)
    y, _ = layer(x, cu_seqlens=offsets(), parents=torch.tensor(PARENTS))
    assert all(x.expired() for x in made)  # of its parts q and k are turned, and v is a copy
    wanted = [layer(x[:, path_of(n)])[0][:, len(path_of(n)) - m :] for n, m in enumerate(LENGTHS)]
    same(y, torch.cat(wanted, 1), [x, *layer.parameters()])


def same(y: Tensor, wanted: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(y, wanted, atol=1e-10, rtol=1e-8)
    weights = torch.randn(y.shape, dtype=y.dtype)
    found, other = (
        torch.autograd.grad((z * weights).sum(), inputs, allow_unused=True) for z in (y, wanted)
    )
    for a, b in zip(found, other):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-7)


def model_of(*mixers: Any, **options: Any) -> SlipstreamForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 24, "num_heads": 2, "intermediate_size": 40}
    config = SlipstreamConfig(mixers=list(mixers), **sizes, **options)
    return SlipstreamForCausalLM(config).double().train()


@pytest.mark.parametrize("mixers", [("gated_deltanet", "attention"), ("rwkv7", "rwkv7")])
def test_model_of_a_tree_is_that_of_its_branches(mixers: tuple[str, ...]) -> None:
    """Its loss is the mean over the labels, each once."""
    mlps = ["rwkv7" if "rwkv7" in mixers else "swiglu"] * 2
    model = model_of(*mixers, mlps=mlps)
    ids = torch.randint(50, (1, sum(LENGTHS)))
    labels, losses, count = ids.clone(), [], 0
    shared = [t for n in set(PARENTS) - {-1} for t in range(*offsets()[n : n + 2].tolist())]
    labels[:, shared] = -100
    out = model(input_ids=ids, labels=labels, cu_seqlens=offsets(), parents=torch.tensor(PARENTS))
    for n in leaves():
        row = path_of(n)
        if (labels[:, row[1:]] != -100).any():
            own = int((labels[:, row[1:]] != -100).sum())
            given: Any = {"labels": labels[:, row], "num_items_in_batch": 1}
            losses.append(model(input_ids=ids[:, row], **given).loss)
            count += own
    wanted = torch.stack(losses).sum() / count
    same(out.loss, wanted, [x for x in model.parameters() if x.requires_grad])
