"""The step kernel on a device: the oracle's numbers, in the pool and out of it, compiled too.

What it computes under Triton's interpreter is in tests/kernels/linear/test_triton_decode_pool.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.decode_pool import HV, INDICES, KINDS, SLOTS, TOKENS, K, V, expected, make, step
from tests.support.operators import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE, IMPL = "cuda", "triton"
LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}


def pool_of(v_first: bool, padded: bool) -> Tensor:
    """Slots of [HV, K, V] as they lie, apart by more than a state if padded."""
    row = HV * K * V
    rows = torch.randn(SLOTS, row + (77 if padded else 0))[:, :row]
    return rows.unflatten(1, (HV, V, K) if v_first else (HV, K, V))


@pytest.mark.parametrize("v_first", [False, True], ids=["K first", "V first"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_step_is_the_reference(kind: str, dtype: torch.dtype, v_first: bool) -> None:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        for tokens in TOKENS:
            terms, state = make(kind, tokens, dtype), pool_of(v_first, padded=tokens == 1)
            pool = (state.mT if v_first else state).clone()
            want, after = expected(terms, pool, INDICES)
            slots: dict[str, Any] = {"state_indices": torch.tensor(INDICES)}
            options = {**slots, "scale": 0.3, "impl": IMPL, "state_v_first": v_first}
            before = state.clone()
            again = step(terms, state.clone(), **options)
            o = step(terms, state, **options)
            assert torch.equal(o, again), tokens
            assert relative_error(o, want) <= LIMITS[dtype], tokens
            got = state.mT if v_first else state
            assert relative_error(got, after) <= LIMITS[torch.float32], tokens
            others = [i for i in range(SLOTS) if i not in INDICES]
            assert torch.equal(state[others], before[others]), tokens


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_step_takes_states_of_16_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        terms, pool = make("gated_delta_rule", 1, dtype), pool_of(False, True).to(dtype)
        want, after = expected(terms, pool, INDICES)
        o = step(terms, pool, state_indices=torch.tensor(INDICES), scale=0.3, impl=IMPL)
    assert o.dtype == pool.dtype == dtype
    assert relative_error(o, want) <= LIMITS[dtype]
    assert relative_error(pool, after) <= LIMITS[dtype]


def test_step_of_no_slot_leaves_the_pool() -> None:
    with torch.device(DEVICE):
        for tokens in (1, (1, 1, 1)):
            terms, pool = make("gated_delta_rule", tokens), pool_of(False, False)
            terms.v.fill_(torch.nan)
            before = pool.clone()
            o = step(terms, pool, state_indices=torch.full((3,), -1), impl=IMPL)
            assert torch.equal(pool, before)
            assert not o.any()


@pytest.mark.parametrize("kind", ["gated_delta_rule", "rwkv7"])
def test_step_compiles_fullgraph(kind: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.device(DEVICE):
        terms, state, at = make(kind, 1), pool_of(False, False), torch.tensor(INDICES)
    want, after = expected(terms, state.clone(), INDICES)
    o = compiled(terms, state, state_indices=at, scale=0.3)
    assert relative_error(o, want) <= LIMITS[torch.float32]
    assert relative_error(state, after) <= LIMITS[torch.float32]
