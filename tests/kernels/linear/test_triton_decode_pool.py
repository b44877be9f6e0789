"""recurrent_step: states in a pool, updated in place, in plain torch and in Triton."""

from typing import Any

import pytest
import torch

from tests.support import decode_pool
from tests.support.decode_pool import HV, INDICES, KINDS, SLOTS, TOKENS, K, V, expected, make, step
from tests.support.interpreted import PARTS, interpreted
from tests.support.operators import relative_error


def check_kind(kind: str, impl: str, orders: tuple[bool, ...] = (False, True)) -> None:
    for tokens in TOKENS:
        for v_first in orders:
            terms, pool = make(kind, tokens), torch.randn(SLOTS, HV, K, V)
            want, after = expected(terms, pool, INDICES)
            state = pool.mT.contiguous() if v_first else pool.clone()
            options = {"scale": 0.3, "impl": impl, "state_v_first": v_first}
            o = step(terms, state, state_indices=torch.tensor(INDICES), **options)
            got = state.mT if v_first else state
            assert relative_error(o, want) <= 2e-6, (kind, tokens, v_first)
            assert relative_error(got, after) <= 2e-6, (kind, tokens, v_first)
            untouched = [i for i in range(SLOTS) if i not in INDICES]
            assert torch.equal(got[untouched], pool[untouched])


def check_padded_pool(impl: str) -> None:
    """Slots may be apart by more than a state, as where a layer's states lie beside another's."""
    terms, wide = make("gated_delta_rule", 1), torch.randn(SLOTS, 3 * HV * K * V + 5)
    before = wide.clone()
    state = wide[:, : HV * K * V].unflatten(1, (HV, K, V))
    want, after = expected(terms, state.clone(), INDICES)
    o = step(terms, state, state_indices=torch.tensor(INDICES).int(), scale=0.3, impl=impl)
    assert relative_error(o, want) <= 2e-6
    assert relative_error(state, after) <= 2e-6
    assert torch.equal(wide[:, HV * K * V :], before[:, HV * K * V :])


def check_without_indices(impl: str) -> None:
    terms, pool = make("kda", 1), torch.randn(decode_pool.B, HV, K, V)
    want, after = expected(terms, pool, (0, 1, 2))
    o = step(terms, pool, scale=0.3, impl=impl)
    assert relative_error(o, want) <= 2e-6
    assert relative_error(pool, after) <= 2e-6


def check_nobody_lives(impl: str) -> None:
    for tokens in (1, (1, 1, 1)):
        terms, pool = make("gated_delta_rule", tokens), torch.randn(SLOTS, HV, K, V)
        terms.v.fill_(torch.nan)
        before = pool.clone()
        o = step(terms, pool, state_indices=torch.full((3,), -1), impl=impl)
        assert torch.equal(pool, before)
        assert not o.any()


def check_16_bits(impl: str) -> None:
    """Activations and states of 16 bits: one rounding of each."""
    terms = make("gated_delta_rule", 1, torch.float16)
    pool = torch.randn(SLOTS, HV, K, V).half()
    want, after = expected(terms, pool, INDICES)
    o = step(terms, pool, state_indices=torch.tensor(INDICES), scale=0.3, impl=impl)
    assert o.dtype == pool.dtype == torch.float16
    assert relative_error(o, want) <= 1e-3
    assert relative_error(pool, after) <= 1e-3


def check_l2_norm(impl: str) -> None:
    terms, pool = make("comba", 2), torch.randn(SLOTS, HV, K, V)
    unit = {x: getattr(terms, x) for x in "qkp"}
    unit = {n: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for n, x in unit.items()}
    want, after = expected(terms._replace(**unit), pool, INDICES)
    options = {"state_indices": torch.tensor(INDICES), "scale": 0.3, "impl": impl}
    o = step(terms, pool, use_qk_l2norm_in_kernel=True, **options)
    assert relative_error(o, want) <= 2e-6
    assert relative_error(pool, after) <= 2e-6


CHECKS = (check_padded_pool, check_without_indices, check_nobody_lives, check_16_bits)
CHECKS += (check_l2_norm,)


@pytest.mark.parametrize("kind", KINDS)
def test_step_updates_the_pool(kind: str) -> None:
    check_kind(kind, "eager")


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__[6:])
def test_step(check: Any) -> None:
    check("eager")


def test_step_rejects_what_does_not_fit() -> None:
    terms, pool = make("gated_delta_rule", 1), torch.randn(SLOTS, HV, K, V)
    at = torch.tensor(INDICES)
    faults: dict[str, dict[str, Any]] = {
        r"state: want shape \(3, 2, 20, 33\)": {"state": pool},
        r"state: want shape \(7, 2, 33, 20\)": {"state": pool, "state_indices": at, "v": True},
        r"state_indices: want shape \(3,\)": {"state": pool, "state_indices": at[:2]},
        r"state_indices: want less than the 7 slots, got 7": {"state": pool,
            "state_indices": at + 3},
        r"state_indices: want each slot at most once": {"state": pool, "state_indices": at * 0},
    }  # fmt: skip
    for fault, given in faults.items():
        options: dict[str, Any] = {"state_v_first": True} if given.pop("v", False) else {}
        with pytest.raises(ValueError, match=fault):
            step(terms, **given, **options)
    with pytest.raises(TypeError, match="state_indices: want int32 or int64"):
        step(terms, pool, state_indices=at.float())
    with pytest.raises(ValueError, match="p: wants beta too"):
        step(make("retention", 1)._replace(p=terms.q), pool, state_indices=at)
    with pytest.raises(NotImplementedError, match="no gradients"):
        step(terms._replace(q=terms.q.clone().requires_grad_()), pool, state_indices=at)
    with pytest.raises(NotImplementedError, match="impl='triton'"):
        step(terms, pool, state_indices=at, impl="triton")


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_step_updates_the_pool_when_interpreted(part: str) -> None:
    for i, kind in enumerate(KINDS):
        if (kind in ("retention", "gla both", "rwkv7", "all")) == (part == "sample"):
            check_kind(kind, "triton", (i % 2 == 0,))
    for check in CHECKS if part == "sample" else ():
        check("triton")
