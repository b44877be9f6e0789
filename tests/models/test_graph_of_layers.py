"""Under torch.compile layers of one kind share a graph: none reads which layer it is."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM


# of Dynamo itself
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(("mixer", "graphs"), [("kda", 1), ("rwkv7", 2)])
def test_layers_share_a_graph(mixer: str, graphs: int) -> None:
    """rwkv7's first layer makes the value that others take."""
    mixers: list[Any] = [mixer] * 3
    config = SlipstreamConfig(vocab_size=64, hidden_size=64, num_heads=2, mixers=mixers)
    model: Any = SlipstreamForCausalLM(config).train()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    torch._dynamo.reset()
    counters.clear()
    ids = torch.arange(2 * 20).remainder(64).view(2, 20)
    model(input_ids=ids, labels=ids).loss.backward()
    assert counters["stats"]["unique_graphs"] == graphs
