"""A training step by CapturedLoss: losses and gradients of steps without, batch after batch."""

import pytest
import torch

from slipstream.models import MIXERS, SlipstreamConfig, SlipstreamForCausalLM
from slipstream.runtime.dispatch import FALLBACK
from slipstream.training import CapturedLoss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB = 211


def make(name: str) -> SlipstreamForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 256, "num_heads": 2}
    model = SlipstreamForCausalLM(SlipstreamConfig(mixers=[name, name], **sizes))
    return model.to("cuda", torch.bfloat16).train()


@pytest.mark.filterwarnings("ignore::slipstream.runtime.dispatch.FallbackWarning")
@pytest.mark.parametrize("name", MIXERS)
def test_captured_step_is_the_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "mla":
        monkeypatch.setenv(FALLBACK, "warn")  # its keys are wider than kernels take
    plain, model = make(name), make(name)
    captured = CapturedLoss(model)
    found = []
    for ids in torch.randint(1, VOCAB, (3, 2, 130), device="cuda"):
        want = plain(input_ids=ids, labels=ids, use_cache=False).loss
        got = captured(input_ids=ids, labels=ids, use_cache=False)
        want.backward()
        got.backward()  # the second and third add to the gradients of the first
        found.append((got.detach(), want.detach()))
    assert len(captured._captured) == 1
    for got, want in found:
        torch.testing.assert_close(got, want, rtol=1e-3, atol=0)
    for (where, x), y in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert x.grad is not None, where
        assert y.grad is not None, where
        # products of captured streams may be summed in another order
        assert (x.grad - y.grad).norm() <= 2e-2 * x.grad.norm(), where
