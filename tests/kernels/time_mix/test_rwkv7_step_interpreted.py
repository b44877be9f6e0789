"""RWKV-7's decoding step, its mixes and its low-rank products: in plain torch, and by Triton's
interpreter in a process of their own."""

from typing import Any

import pytest
import torch

from slipstream.kernels.time_mix import low_rank
from slipstream.ops import rwkv7_step, token_mix_step
from tests.support import rwkv7_steps as steps
from tests.support.interpreted import interpreted


@interpreted
def test_triton_rwkv7_step_matches_formula() -> None:
    steps.check_all("triton")
    steps.check_tiles_of_columns("triton")
    steps.check_probe()
    assert steps.check_layer("triton") == ["token_mix_step", "low_rank", "rwkv7_step"] * 4


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_plain_rwkv7_step_matches_formula(impl: str) -> None:
    steps.check_all(impl)


def test_layer_by_it_and_by_its_parts() -> None:
    assert steps.check_layer(None) == ["token_mix_step", "low_rank", "rwkv7_step"] * 4


REFUSALS: dict[str, dict[str, Any]] = {
    r"v_gate: wants first_value": {"first_value": None},
    r"v_bias: wants v_gate": {"first_value": None, "v_gate": None},
    r"norm_eps: want 0 or more": {"norm_eps": -1.0},
    r"state_indices: want each slot at most once": {"state_indices": torch.tensor([1, 1, -1])},
    r"state_indices: want less than the 5 slots": {"state_indices": torch.tensor([1, 5, -1])},
    r"state: want shape \(3, ": {"state_indices": None},
}


@pytest.mark.parametrize("words", REFUSALS)
def test_rwkv7_step_refuses(words: str) -> None:
    args = steps.make(steps.Sizes()) | {"state_indices": torch.tensor(steps.INDICES)}
    with pytest.raises(ValueError, match=words):
        rwkv7_step(**{**args, **REFUSALS[words]})


def test_steps_refuse_gradients() -> None:
    args = steps.make(steps.Sizes())
    args["state"] = args["state"][:3].clone()
    args["k"].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"under torch\.no_grad"):
        rwkv7_step(**args)
    mu = torch.randn(2, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"under torch\.no_grad"):
        token_mix_step(torch.randn(3, 8), mu, state=torch.randn(3, 8))


def test_low_rank_products_of_no_tokens() -> None:
    t = steps.low_rank_inputs(0, 8, (5, 3, 4), torch.float32)
    assert low_rank.low_rank(t).shape == (3, 0, 8)
