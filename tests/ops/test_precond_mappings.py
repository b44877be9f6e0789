"""The preconditioned operators against their paper's recurrence, written out token by token."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.kernels.linear import dispatch
from slipstream.kernels.linear.channel_gates import as_dplr
from slipstream.ops import _preconditioner
from tests.support.mappings import both, same
from tests.support.recurrences import (
    HV,
    B,
    H,
    K,
    T,
    V,
    beta,
    erase,
    grouped,
    log_decay,
    outer,
    randn,
    read,
    unit,
)


def arguments(name: str) -> dict[str, Tensor]:
    return {
        "q": randn(B, T, H, K),
        "k": unit(B, T, H, K),
        "v": randn(B, T, HV, V),
        "g": log_decay(B, T, HV, *([K] if name == "precond_kda" else [])),
        "g_atk": log_decay(B, T, H),
        "beta_atk": beta(B, T, H),
        "beta": beta(B, T, HV),
    }


def recurrence(
    given: dict[str, Tensor], S: Tensor, A: Tensor, x: float, eps: float, centre: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    q, k, v, g, g_atk, beta_atk, rate = given.values()
    g = (g if g.dim() == 4 else g[..., None].expand(*g.shape, K)).exp()
    outputs = []
    for t in range(T):
        A = g_atk[:, t, :, None].exp() * A + beta_atk[:, t, :, None] * k[:, t].square()
        r = (A + eps).log() - centre[:, None]
        factor = x ** (-r / (1 + r.abs()))
        query, key, written = grouped(*(y[:, None] for y in (q[:, t], k[:, t], factor * k[:, t])))
        S = erase(written, key, rate[:, t : t + 1], 0) @ (g[:, t, :, :, None] * S)
        S = S + outer(rate[:, t, :, None] * written[:, 0], v[:, t])
        outputs.append(K**-0.5 * read(S, query[:, 0]))
    return torch.stack(outputs, 1), (S, A)


every_form = pytest.mark.parametrize(
    ("name", "fn"),
    [(name, fn) for name in ("precond_gated_delta_rule", "precond_kda") for fn in both(name)],
)


@every_form
@pytest.mark.parametrize("impl", [None, "reference"])
def test_precond_is_its_recurrence(name: str, fn: Callable, impl: str | None) -> None:
    given, states = arguments(name), (randn(B, HV, K, V), torch.rand(B, H, K).double())
    centre = randn(H)
    want = recurrence(given, *states, 1.7, 1e-3, centre)
    options: dict[str, Any] = {"x": 1.7, "eps": 1e-3, "impl": impl, "output_final_state": True}
    got = fn(**given, **options, log_atk_scale=centre, initial_state=states)
    same(got, want, 1e-11)
    turned = (states[0].mT, states[1])
    got = fn(**given, **options, log_atk_scale=centre, initial_state=turned, state_v_first=True)
    same((got[0], (got[1][0].mT, got[1][1])), want, 1e-11)


@pytest.mark.parametrize("reverse", [False, True])
def test_precond_kda_by_gates_of_channels(monkeypatch: pytest.MonkeyPatch, reverse: bool) -> None:
    """As the kernels for sm_90 take it, which are not here: the same recurrence and gradients."""
    found = []
    for by_gates in (False, True):
        if by_gates:

            def run(terms: Any, options: Any, recurrent: bool) -> Any:
                assert terms.erase is not None
                return dispatch.run(as_dplr(terms), options, recurrent=recurrent)

            monkeypatch.setattr(_preconditioner, "_as_gates", lambda *_: True)
            monkeypatch.setattr(_preconditioner, "run", run)
        torch.manual_seed(0)
        given = {name: x.requires_grad_() for name, x in arguments("precond_kda").items()}
        o, _ = ops.chunk_precond_kda(**given, x=1.7, eps=1e-3, reverse=reverse)
        found.append((o, torch.autograd.grad(o.sin().sum(), [*given.values()])))
    same(found[0], found[1], 1e-11)


@every_form
def test_precond_by_one_is_the_rule_without(name: str, fn: Callable) -> None:
    given = arguments(name)
    o, _ = fn(**given, x=1.0)
    given = {n: y for n, y in given.items() if not n.endswith("_atk")}
    plain = getattr(ops, fn.__name__.replace("precond_", ""))
    torch.testing.assert_close(o, plain(**given)[0])


@every_form
def test_precond_defaults_are_those_of_fla(name: str, fn: Callable) -> None:
    given, zeros = arguments(name), (torch.zeros(B, HV, K, V), torch.zeros(B, H, K))
    centre = torch.full((H,), -0.2, dtype=torch.float64)
    want, _ = recurrence(given, *(x.double() for x in zeros), 1.5, 1e-6, centre)
    torch.testing.assert_close(fn(**given)[0], want)


@every_form
def test_precond_rejects_what_does_not_fit(name: str, fn: Callable) -> None:
    given = arguments(name)
    with pytest.raises(ValueError, match="g_atk: want"):
        fn(**{**given, "g_atk": given["g"]})
    with pytest.raises(ValueError, match="x: want a number above 0"):
        fn(**given, x=0.0)
    with pytest.raises(ValueError, match="log_atk_scale: want"):
        fn(**given, log_atk_scale=randn(H + 1))
    with pytest.raises(TypeError, match="initial_state: want a tuple"):
        fn(**given, initial_state=randn(B, HV, K, V))
    with pytest.raises(ValueError, match=r"initial_state\[1\]: want"):
        fn(**given, initial_state=(randn(B, HV, K, V), randn(B, HV, K)))
