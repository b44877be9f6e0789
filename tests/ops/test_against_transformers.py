"""An independent check: transformers' own torch functions give what ours give, gradients too."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream import ops

qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")

PAIRS = {
    "chunk_gated_delta_rule": (ops.chunk_gated_delta_rule, qwen.torch_chunk_gated_delta_rule),
    "recurrent_gated_delta_rule": (
        ops.fused_recurrent_gated_delta_rule,
        qwen.torch_recurrent_gated_delta_rule,
    ),
    "chunk_kda": (ops.chunk_kda, kimi.chunk_kimi_delta_attention),
    "recurrent_kda": (ops.fused_recurrent_kda, kimi.recurrent_kimi_delta_attention),
}


@pytest.mark.parametrize("tokens", [1, 50, 130])
@pytest.mark.parametrize("name", PAIRS)
def test_operator_matches_transformers(name: str, tokens: int) -> None:
    ours, theirs = PAIRS[name]
    shape = (2, tokens, 4, 32)
    inputs = {
        "q": torch.randn(shape),
        "k": torch.randn(shape),
        "v": torch.randn(2, tokens, 4, 24),
        "g": F.logsigmoid(torch.randn(shape if "kda" in name else shape[:3])),
        "beta": torch.rand(shape[:3]),
    }
    inputs = {key: x.requires_grad_() for key, x in inputs.items()}
    options: dict[str, Any] = {
        "initial_state": torch.randn(2, 4, 32, 24),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    got, got_state = ours(**inputs, **options)
    q, k, v = (inputs[n] for n in "qkv")
    want, want_state = theirs(q, k, v, g=inputs["g"], beta=inputs["beta"], **options)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got_state, want_state, rtol=1e-4, atol=1e-4)
    weight = torch.randn_like(want)

    def grads(o: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((o * weight).sum(), list(inputs.values()))

    for key, mine, other in zip(inputs, grads(got), grads(want), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-3, atol=2e-4, msg=key)
