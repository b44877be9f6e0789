"""consistent=True on a GPU: equal bits whatever the batch, the cut and the step."""

import pytest
import torch

from slipstream.ops import short_convolution
from tests.support.consistent import LENGTH, OPERATORS, Sample, attention_differing, differing
from tests.support.consistent_models import differing as logits_differing
from tests.support.consistent_models import model_of
from tests.support.operators import Size

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BF16 = torch.bfloat16


@pytest.mark.parametrize("impl", [None, "triton"])
@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
def test_operator_on_cuda_gives_equal_bits(op: Sample, impl: str | None) -> None:
    size = Size(B=3, T=LENGTH, H=2, HV=4, K=64, V=64, gate="mixed", dtype=BF16)
    assert differing(op, 10, impl, size=size, device="cuda") == 0


@pytest.mark.parametrize("impl", [None, "triton"])
def test_attention_on_cuda_gives_equal_bits(impl: str | None) -> None:
    assert attention_differing(10, impl, width=64, device="cuda", dtype=BF16) == 0


@pytest.mark.parametrize("mixers", [("gated_deltanet", "attention"), ("kda", "mamba2")], ids=str)
def test_model_on_cuda_gives_equal_bits(mixers: tuple[str, ...]) -> None:
    model = model_of(*mixers, hidden_size=256, num_heads=2).to("cuda", BF16)
    assert logits_differing(model, 6) == 0


def test_convolution_on_cuda_gives_equal_bits() -> None:
    x = torch.randn(1, 200, 64, device="cuda", dtype=BF16)
    weight = torch.randn(64, 4, device="cuda", dtype=BF16)
    options = {"activation": "silu", "output_final_state": True}
    whole, _ = short_convolution(x, weight, **options)
    _, state = short_convolution(x[:, :64], weight, **options)
    for end in (65, 70, 200):
        part, _ = short_convolution(x[:, 64:end], weight, initial_state=state, **options)
        assert torch.equal(part, whole[:, 64:end])
