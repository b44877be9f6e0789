"""MLA beside transformers' DeepSeek V3: prefill, decoding in either form, packed sequences."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.layers import MLA

pytestmark = pytest.mark.filterwarnings("ignore")
D, H, R, NOPE, ROPE, V = 24, 3, 10, 6, 4, 5


def pair(q_lora: int | None, interleaved: bool = True, mode: str | None = None) -> tuple[Any, Any]:
    """Theirs and ours with the same weights."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

    config = transformers.DeepseekV3Config(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=H, q_lora_rank=q_lora,
        kv_lora_rank=R, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V,
        rope_interleave=interleaved, attention_bias=False, attn_implementation="eager",
    )  # fmt: skip
    theirs = hf.DeepseekV3Attention(config, 0).eval()
    ours = MLA(
        D, H, q_lora, R, NOPE, ROPE, V,
        interleaved=interleaved, norm_eps=theirs.kv_a_layernorm.variance_epsilon, mode=mode,
    )  # fmt: skip
    names = {
        "q_proj.weight": "q_b_proj.weight" if q_lora else "q_proj.weight",
        "kv_a_proj.weight": "kv_a_proj_with_mqa.weight",
        "kv_norm": "kv_a_layernorm.weight",
        "kv_b_proj.weight": "kv_b_proj.weight",
        "o_proj.weight": "o_proj.weight",
    }
    if q_lora:
        names |= {"q_a_proj.weight": "q_a_proj.weight", "q_norm": "q_a_layernorm.weight"}
    weights = dict(theirs.named_parameters())
    assert weights.keys() == set(names.values())
    with torch.no_grad():
        for parameter in weights.values():
            parameter.copy_(0.4 * torch.randn_like(parameter) + (parameter.dim() == 1))
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights[names[name]])
    rotary = hf.DeepseekV3RotaryEmbedding(config)

    def run(x: Tensor) -> Tensor:
        T = x.shape[1]
        mask = torch.full((T, T), torch.finfo(x.dtype).min).triu(1)[None, None]
        return theirs(x, rotary(x, torch.arange(T)[None]), mask)[0]

    return run, ours


@pytest.mark.parametrize("q_lora", [None, 7])
@pytest.mark.parametrize("interleaved", [True, False])
def test_prefill_matches_deepseek(q_lora: int | None, interleaved: bool) -> None:
    theirs, ours = pair(q_lora, interleaved)
    x = torch.randn(2, 21, D, requires_grad=True)
    want, got = theirs(x), ours(x)[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(want)
    grads = [torch.autograd.grad(y, x, weight)[0] for y in (want, got)]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", [None, "chunk", "fused_recurrent"])
def test_decoding_matches_deepseek(mode: str | None) -> None:
    theirs, ours = pair(7, mode=mode)
    x = torch.randn(2, 30, D)
    with torch.no_grad():
        y, state = ours(x[:, :9], use_cache=True)
        parts = [y]
        for a, b in [(9, 10), (10, 14), *((t, t + 1) for t in range(14, 30))]:
            y, state = ours(x[:, a:b], state=state, use_cache=True)
            parts.append(y)
        want = theirs(x)
    assert state["latent"].shape == (2, 30, R + ROPE)
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=1e-4, atol=1e-5)


def test_packed_sequences_match_deepseek() -> None:
    theirs, ours = pair(None)
    lengths = (5, 0, 1, 13)
    x = torch.randn(1, sum(lengths), D)
    offsets = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    got = ours(x, cu_seqlens=offsets)[0].split(lengths, 1)
    for y, part in zip(got, x.split(lengths, 1)):
        if part.shape[1]:
            torch.testing.assert_close(y, theirs(part), rtol=1e-4, atol=1e-5)


def test_absorbed_decoding_has_gradients() -> None:
    """As written out, to x and every weight."""
    _, ours = pair(7)
    x = torch.randn(2, 12, D, requires_grad=True)
    found = []
    for mode in ("chunk", "fused_recurrent"):
        ours.mode = mode
        _, state = ours(x[:, :8], use_cache=True)
        y, _ = ours(x[:, 8:], state=state)
        found.append([y, *torch.autograd.grad(y.sin().sum(), [x, *ours.parameters()])])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
