"""The parts of a block that a config can choose: MLPs, norms, the norm after the embedding.

Models of them are among those of test_model.py."""

from typing import Any

import pytest
import torch
from torch import nn

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from slipstream.models.mlps import MoE
from tests.support.language_models import PARTS, VOCAB, config, model

every_model = pytest.mark.parametrize("name", PARTS)


@every_model
def test_new_weights_are_finite_and_of_the_configured_size(name: str) -> None:
    made = SlipstreamForCausalLM(config(name, initializer_range=0.3))
    assert all(p.isfinite().all() for p in made.parameters())
    for module in made.modules():
        if isinstance(module, MoE):
            assert 0.2 < module.block.experts.down_proj.std() < 0.4
            assert 0.2 < module.block.gate.weight.std() < 0.4
            assert not any(buffer.any() for buffer in module.buffers())


@torch.no_grad()
def test_residual_stream_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ids = model("mamba2 blocks").to(torch.bfloat16), torch.randint(VOCAB, (1, 9))
    seen: list[torch.dtype] = []
    made.model.layers[0].register_forward_hook(lambda *x: seen.append(x[2][0].dtype))
    made.model.layers[1].register_forward_hook(lambda *x: seen.append(x[2][0].dtype))
    out = made(ids, output_hidden_states=True)
    assert seen == [torch.float32] * 2 and out.logits.dtype == torch.bfloat16
    # 1.1 to 2.0% of them over eight seeds
    want = model("mamba2 blocks")(ids).logits
    assert (out.logits.float() - want).norm() <= 0.06 * want.norm()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"mlps": ["swiglu"]}, "mlps: want the 2 entries that mixers has, got 1"),
        ({"mlps": ["swiglu", "gelu"]}, r"mlps\[1\]: want one of swiglu, .*got 'gelu'"),
        ({"mlps": ["swiglu", {"intermediate_size": 8}]}, r"mlps\[1\]: want one of"),
        ({"norm": "batch"}, "norm: want one of rms, .*got 'batch'")],
)  # fmt: skip
def test_configs_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlipstreamConfig(mixers=["gla", "gla"], **options)


def test_norms_of_mixers_may_be_hooked_or_others() -> None:
    made, ids = model("mamba2 blocks"), torch.randint(VOCAB, (2, 21))
    made.model.config.residual_in_fp32 = False
    for block in made.model.layers:
        block.residual_in_fp32 = False
    want, seen = made(ids).logits, []
    norm: Any = made.model.layers[0].mixer_norm
    hook = norm.register_forward_hook(lambda module, args, y: seen.append(y))
    torch.testing.assert_close(made(ids).logits, want)
    hook.remove()
    assert [type(y) for y in seen] == [torch.Tensor]
    other = nn.RMSNorm(32, norm.eps)
    other.weight = norm.weight
    made.model.layers[0].mixer_norm = other
    torch.testing.assert_close(made(ids).logits, want)
