"""generate within and outside of inference mode, in turns, on the same model."""

import pytest
import torch

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM

pytestmark = pytest.mark.usefixtures("graphs_on_a_cpu")


def model(*mixers: str) -> SlipstreamForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 23, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    return SlipstreamForCausalLM(SlipstreamConfig(mixers=list(mixers), **sizes)).eval()


@pytest.mark.parametrize("mixers", [("rwkv7",), ("gla", "attention")], ids=str)
@pytest.mark.parametrize("modes", [(True, False, True), (False, True, False)], ids=str)
def test_generate_in_and_out_of_inference_mode(mixers: tuple, modes: tuple) -> None:
    m, ids = model(*mixers), torch.randint(3, 23, (3, 5))
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    found = []
    for mode in modes:
        with torch.inference_mode(mode):
            found.append(m.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist())
    assert found[0] == found[1] == found[2]


def test_inference_mode_leaves_graphs_to_later_calls() -> None:
    m, ids = model("attention"), torch.randint(3, 23, (3, 5))
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        m.generate(ids, attention_mask=torch.ones_like(ids), **options)
    before = m.decoding.captures
    m.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert m.decoding.captures > before and m.decoding.reason is None
