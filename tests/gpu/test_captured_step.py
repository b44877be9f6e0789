"""A training step by torch.cuda.make_graphed_callables: loss and gradients of a step without."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.models import MIXERS, SlipstreamConfig, SlipstreamForCausalLM
from slipstream.runtime.dispatch import FALLBACK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB = 211


class Loss(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCAB, "hidden_size": 256, "num_heads": 2}
        self.model = SlipstreamForCausalLM(SlipstreamConfig(mixers=[name, name], **sizes))

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss


@pytest.mark.filterwarnings("ignore::slipstream.runtime.dispatch.FallbackWarning")
# of the warm-up's, which torch.cuda.make_graphed_callables itself keeps alive
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("name", MIXERS)
def test_captured_step_is_the_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "mla":
        monkeypatch.setenv(FALLBACK, "warn")  # its keys are wider than kernels take
    plain, captured = (Loss(name).to("cuda", torch.bfloat16).train() for _ in range(2))
    batches = torch.randint(1, VOCAB, (3, 2, 130), device="cuda")
    graphed: Any = torch.cuda.make_graphed_callables(captured, (batches[0].clone(),))
    for x in (*plain.parameters(), *captured.parameters()):
        x.grad = torch.zeros_like(x)  # or a graph's own buffer became the first one's gradient
    for ids in batches[1:]:  # the second adds to the gradients of the first
        want, got = plain(ids), graphed(ids)
        want.backward()
        got.backward()
        torch.testing.assert_close(got, want, rtol=1e-3, atol=0)
    for (where, x), y in zip(plain.named_parameters(), captured.parameters(), strict=True):
        assert x.grad is not None, where
        assert y.grad is not None, where
        # products of captured streams may be summed in another order
        assert (x.grad - y.grad).norm() <= 2e-2 * x.grad.norm(), where
