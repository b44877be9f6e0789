"""States that operators leave on their way, on a GPU, beside those of calls one by one."""

from typing import Any

import pytest
import torch

from slipstream.models import PrefixCache, SlipstreamConfig, SlipstreamForCausalLM
from tests.gpu.sm90_runs import MARKS
from tests.support.operators import relative_error
from tests.support.prefix_states import OPERATORS, Call, expect_prefix_states, one_by_one

pytestmark = MARKS

SIZES = {
    "few heads": {"B": 2, "T": 4200, "H": 2, "HV": 4},
    "many heads": {"B": 8, "T": 500, "H": 16, "HV": 32},
    "packed": {"lengths": (700, 5, 0, 1030, 64, 129), "H": 16, "HV": 32},
}


def call_of(operator: str, size: str, width: int, **options: Any) -> Call:
    given = {"lengths": None, **SIZES[size]}
    wide = {"dtype": torch.bfloat16, "device": "cuda", "K": width, "V": width}
    return Call.make(operator, given.pop("lengths"), **given, **wide, **options)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("impl", ["sm90", "triton"])
def test_states_are_those_of_prefixes(operator: str, size: str, impl: str) -> None:
    width = 64 if operator == "chunk_rwkv7" else 128
    try:
        call = call_of(operator, size, width, impl=impl)
        call.run()
    except NotImplementedError as error:
        pytest.skip(str(error))
    expect_prefix_states(call_of(operator, size, width, impl=impl), rtol=3e-2)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("size", SIZES)
def test_consistent_states_equal_calls_one_by_one(operator: str, size: str) -> None:
    width = 64 if operator == "chunk_rwkv7" else 128
    call = call_of(operator, size, width, consistent=True)
    o, pool, final = call.run()
    want, prefixes, ends = one_by_one(call)
    assert torch.equal(o, want) and torch.equal(final, ends)
    for row, state in prefixes.items():
        assert torch.equal(pool[row], state), row


def test_states_of_256_channels() -> None:
    call = call_of("chunk_simple_gla", "packed", 256)
    expect_prefix_states(call, rtol=3e-2)


@pytest.mark.parametrize("mixer", ["gated_deltanet", "kda", "gla", "mamba2", "rwkv7"])
@torch.no_grad()
def test_one_call_leaves_prefixes_of_a_model(mixer: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 256, "num_heads": 2}
    config = SlipstreamConfig(mixers=[mixer, "attention", mixer], **sizes)
    m: Any = SlipstreamForCausalLM(config).to("cuda", torch.bfloat16).eval()
    ids = torch.randint(0, 97, (1, 700), device="cuda")
    found, want = PrefixCache(m, 128), PrefixCache(m, 128)
    want._leaves_states = lambda: False
    whole, by_calls = found.prefill(ids), want.prefill(ids)
    assert len(found.caches) == len(want.caches) == 5
    pairs = [(found.caches[x], want.caches[x]) for x in want.caches]
    for mine, other in [*pairs, (whole, by_calls)]:
        assert mine.get_seq_length() == other.get_seq_length()
        for layer, its in zip(mine.layers, other.layers, strict=True):
            view = layer.view(0)
            for name, x in its.view(0).items():
                assert relative_error(view[name], x) < 3e-2, name
