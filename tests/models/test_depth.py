"""Attention residuals between layers: the formula, where it begins, and what it refuses."""

from typing import Any

import pytest
import torch

from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM

SIZES: dict[str, Any] = {"vocab_size": 20, "hidden_size": 16, "num_heads": 2}


def model(**options: Any) -> SlipstreamForCausalLM:
    torch.manual_seed(0)
    mixers: list[Any] = ["gla"] * 3
    return SlipstreamForCausalLM(SlipstreamConfig(**SIZES, mixers=mixers, **options)).double()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_layers_get_the_formula(group: int, wide: bool) -> None:
    made = model(attention_residuals=group, residual_in_fp32=wide)
    ids = torch.randint(20, (2, 9))
    depth: Any = made.model.depth
    with torch.no_grad():
        depth.query.normal_()
        depth.weight.normal_()
    v = [made.model.embed_tokens(ids)]
    h = v[0]
    for i, block in enumerate(made.model.layers):
        added = block(h)[0] - h
        v = [*v, added] if i % group == 0 else [*v[:-1], v[-1] + added]
        units = [x * (x.square().mean(-1, keepdim=True) + depth.eps).rsqrt() for x in v]
        scores = [(x * depth.weight[i] * depth.query[i]).sum(-1, keepdim=True) for x in units]
        p = torch.stack(scores).softmax(0)
        h = (p * torch.stack(v)).sum(0)
    want = made.model.norm(h)
    got = made.model(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(got, want)
    got.square().sum().backward()
    assert all(x.grad is not None and x.grad.any() for x in (depth.query, depth.weight))


def test_residuals_in_float32_are_no_narrower_than_the_weights() -> None:
    ids = torch.randint(20, (2, 9))
    for options in ({}, {"attention_residuals": 2}):
        plain, wide = (model(**options, residual_in_fp32=x).eval() for x in (False, True))
        for step in (ids, ids[:, :1]):
            caches = [x(ids).past_key_values for x in (plain, wide)]
            got, want = (
                x(step, past_key_values=c).logits for x, c in zip((wide, plain), reversed(caches))
            )
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
