"""What no number of a whole call tells: names of samples, shapes of gradients, and what ranks,
engines and sharded models hand on."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from slipstream.kernels.attnres import op as attnres
from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM, tensor_parallel
from slipstream.ops import _running_sums
from slipstream.tools.catalog import OPERATORS
from tests.support.engine_plugins import forget_vllm


def test_fixed_arguments_of_samples_are_arguments() -> None:
    for row in OPERATORS:
        names = {word.partition("=")[0] for word in row.tensors.split()}
        assert {*row.fixed.split()} <= names and {*row.written.split()} <= names, row


@pytest.mark.parametrize("normed", [True, False])
def test_gradients_of_attnres_have_the_shapes_of_inputs(normed: bool) -> None:
    x = [torch.empty(5, 8, device="meta") for _ in range(3)]
    weight = torch.empty(8, device="meta")
    da, dwo, *dx = attnres._backward_fake(weight, x, weight, weight if normed else None, 1e-6, 1.0)
    assert da.shape == (8,) and dwo.shape == (8 * normed,) and [y.shape for y in dx] == 3 * [(5, 8)]


def test_running_max_goes_on_behind_other_ranks() -> None:
    k, w, start = torch.randn(1, 6, 4), -torch.rand(4), torch.randn(1, 4)
    whole = _running_sums.running_max(k, w, start, None, None)
    share = SimpleNamespace(
        packed=False,
        earlier=(0,),
        later=(),
        crossings=SimpleNamespace(any=True),
        pieces=(0,),
        head_end=3,
        local_states=lambda first, nothing, rows: nothing,
        gather=lambda x: [whole[:, 2], x],
        tokens_of=lambda rank, n: 3,
    )
    context: Any = SimpleNamespace(share=lambda T: share, offsets_on=lambda device: None)
    m = _running_sums.running_max(k[:, 3:] - 1.0, w, start, None, context)
    want = _running_sums.running_max(torch.cat([k[:, :3], k[:, 3:] - 1.0], 1), w, start, None, None)
    torch.testing.assert_close(m, want[:, 3:])


@pytest.mark.parametrize("tied", [True, False])
def test_sharded_models_save_a_tied_head_once(tied: bool) -> None:
    config = SlipstreamConfig(
        vocab_size=8, hidden_size=32, mixers=["gla"], num_heads=2, tie_word_embeddings=tied
    )
    model, saved = SlipstreamForCausalLM(config), mock.Mock()
    weights = {"lm_head.weight": torch.zeros(8, 8)}
    with (
        mock.patch.object(tensor_parallel, "is_sharded", return_value=True),
        mock.patch.object(tensor_parallel, "whole_state_dict", return_value=weights),
        mock.patch.object(torch.distributed, "get_rank", return_value=0),
        mock.patch("transformers.PreTrainedModel.save_pretrained", saved),
    ):
        model.save_pretrained("nowhere")
    names = [] if tied else ["lm_head.weight"]
    assert [*saved.call_args.kwargs["state_dict"]] == names


def test_vllm_projections_are_put_in_order_by_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("forward_context", "model_executor.layers.mamba.mamba_utils"):
        monkeypatch.setitem(sys.modules, f"vllm.{name}", SimpleNamespace())
    forget_vllm()
    try:
        from slipstream.integrations import vllm_steps

        class Base(nn.Module):
            gqa_interleaved_layout, _orders = True, None

            def fix_query_key_value_ordering(self, x: Tensor, ba: Tensor) -> tuple[Tensor, ...]:
                q, z, k, v = x.unflatten(1, (2, -1)).chunk(4, -1)
                b, a = ba.unflatten(1, (2, -1)).chunk(2, -1)
                return q, k, v, z, b.flatten(1), a.flatten(1)

        cls: Any = vllm_steps.delta_net(Base, None)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        x, ba = torch.randn(3, 16), torch.randn(3, 4)
        got = cls._ordered(layer, x, ba)
        *parts, b, a = layer.fix_query_key_value_ordering(x, ba)
        for y, want in zip(got, (torch.cat([t.flatten(1) for t in parts], 1), b, a), strict=True):
            assert torch.equal(y, want)
    finally:
        forget_vllm()
