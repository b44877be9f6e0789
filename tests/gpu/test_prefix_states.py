"""States that operators leave on their way, on a GPU, beside those of calls one by one."""

from typing import Any

import pytest
import torch

from tests.gpu.sm90_runs import MARKS
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
