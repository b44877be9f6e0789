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
    found, captures = [], []
    for mode in modes:
        with torch.inference_mode(mode):
            found.append(m.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist())
        captures.append(m.decoding.captures)
    assert found[0] == found[1] == found[2] and m.decoding.reason is None
    if modes[0]:  # whose graphs are of no use to later calls
        assert captures[1] > captures[0]
