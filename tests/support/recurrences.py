"""The recurrence of each operator as its paper has it, written out without Terms. Float64, token by
token, states [B, HV, K, V]; the transitions are matrices, as papers have them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream import ops
from slipstream.tools.catalog import family
from tests.support.operators import LINEAR, Size

B, T, H, HV, K, V, M = 2, 37, 2, 4, 5, 3, 6
Trace = Iterator[tuple[Tensor, Tensor]]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def unit(*shape: int) -> Tensor:
    return F.normalize(randn(*shape), dim=-1)


def log_decay(*shape: int) -> Tensor:
    return F.logsigmoid(randn(*shape) + 1)


def grouped(*tensors: Tensor) -> list[Tensor]:
    """Heads of q, k repeated for the value heads that read them."""
    return [x.repeat_interleave(HV // H, dim=2) for x in tensors]


def outer(k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhk,bhv->bhkv", k, v)


def read(S: Tensor, q: Tensor) -> Tensor:
    return torch.einsum("bhkv,bhk->bhv", S, q)


def eye() -> Tensor:
    return torch.eye(K, dtype=torch.float64)


# The recurrences: generators of (output / scale, state) for each token.


def additive(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor, S: Tensor) -> Trace:
    """rows [B, T, HV, K] and columns [B, T, HV, V]: the factors on those of the state."""
    q, k = grouped(q, k)
    for t in range(q.shape[1]):
        S = rows[:, t, :, :, None] * S * columns[:, t, :, None, :] + outer(k[:, t], v[:, t])
        yield read(S, q[:, t]), S


def no_decay() -> tuple[Tensor, Tensor]:
    return (torch.ones(B, T, HV, n, dtype=torch.float64) for n in (K, V))  # type: ignore


def linear_attn(q: Tensor, k: Tensor, v: Tensor, S: Tensor) -> Trace:
    return additive(q, k, v, *no_decay(), S)


def by_head(q: Tensor, k: Tensor, v: Tensor, S: Tensor, gamma: list[float]) -> Trace:
    rows, columns = no_decay()
    return additive(q, k, v, torch.tensor(gamma).double()[:, None] * rows, columns, S)


def retention(q: Tensor, k: Tensor, v: Tensor, S: Tensor) -> Trace:
    return by_head(q, k, v, S, [1 - 2.0 ** (-5 - h) for h in range(HV)])


def lightning_attn(q: Tensor, k: Tensor, v: Tensor, S: Tensor) -> Trace:
    """Layer 3 of 12, so three quarters of the slopes 8 h / HV."""
    slopes = [0.75 * 8 * h / HV for h in range(HV)]
    rows, columns = no_decay()
    gamma = torch.tensor([-x for x in slopes], dtype=torch.float64).exp()
    return additive(q, k, v, gamma[:, None] * rows, columns, S)


def simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> Trace:
    rows, columns = no_decay()
    return additive(q, k, v, g.exp()[..., None] * rows, columns, S)


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    S: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
) -> Trace:
    rows = gk if g is None else g
    assert rows is not None
    return additive(q, k, v, rows.exp(), (0 * v if gv is None else gv).exp(), S)


def rwkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, S: Tensor) -> Trace:
    r, k = grouped(r, k)
    for t in range(T):
        kv = outer(k[:, t], v[:, t])
        o = read(S + u[:, :, None] * kv, r[:, t])
        S = w[:, t].exp()[..., None] * S + kv
        yield o, S


def transitions(q: Tensor, k: Tensor, v: Tensor, A: Callable, beta: Tensor, S: Tensor) -> Trace:
    """S <- A(t) S + beta k v^T with A [B, HV, K, K]; q and k already by value head."""
    for t in range(q.shape[1]):
        S = A(t) @ S + outer(beta[:, t, :, None] * k[:, t], v[:, t])
        yield read(S, q[:, t]), S


def erase(k: Tensor, p: Tensor, beta: Tensor, t: int) -> Tensor:
    """I - beta k p^T."""
    return eye() - beta[:, t, :, None, None] * outer(k[:, t], p[:, t])


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, S: Tensor) -> Trace:
    q, k = grouped(q, k)
    return transitions(q, k, v, lambda t: erase(k, k, beta, t), beta, S)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Trace:
    q, k = grouped(q, k)
    alpha = g.exp()[..., None, None]
    return transitions(q, k, v, lambda t: alpha[:, t] * erase(k, k, beta, t), beta, S)


def kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Trace:
    q, k = grouped(q, k)
    decay = torch.diag_embed(g.exp())
    return transitions(q, k, v, lambda t: erase(k, k, beta, t) @ decay[:, t], beta, S)


def comba(q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Trace:
    """S_t = S_{t-1} (alpha_t I - beta_t p_t k_t^T) + beta_t v_t k_t^T, states [V, K]."""
    q, k, p = grouped(q, k, p)
    S = S.mT
    for t in range(q.shape[1]):
        bt = beta[:, t, :, None, None]
        alpha = g[:, t].exp()[..., None, None]
        S = S @ (alpha * eye() - bt * outer(p[:, t], k[:, t])) + bt * outer(v[:, t], k[:, t])
        yield (S @ q[:, t, :, :, None])[..., 0], S.mT


def dplr_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor, S: Tensor
) -> Trace:
    """As the RWKV-7 paper has it: states are [V, K] and transitions act from the right."""
    q, k, a, b = grouped(q, k, a, b)
    S = S.mT
    for t in range(T):
        S = S @ (torch.diag_embed(gk[:, t].exp()) + outer(a[:, t], b[:, t])) + outer(
            v[:, t], k[:, t]
        )
        yield (S @ q[:, t, :, :, None])[..., 0], S.mT


def rwkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, S: Tensor) -> Trace:
    return dplr_delta_rule(r, k, v, a, b, w, S)


def gdn2(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, S: Tensor) -> Trace:
    q, k = grouped(q, k)
    decay = torch.diag_embed(g.exp())
    for t in range(q.shape[1]):
        S = (eye() - outer(k[:, t], b[:, t] * k[:, t])) @ decay[:, t] @ S
        S = S + outer(k[:, t], w[:, t] * v[:, t])
        yield read(S, q[:, t]), S


def gated_delta_product(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, S: Tensor
) -> Trace:
    q, k = grouped(q, k)
    n = k.shape[1] // q.shape[1]
    for t in range(T):
        if g is not None:
            S = g[:, t].exp()[..., None, None] * S
        for i in range(t * n, t * n + n):
            S = erase(k, k, beta, i) @ S + outer(beta[:, i, :, None] * k[:, i], v[:, i])
        yield read(S, q[:, t]), S


def trace(steps: Trace) -> tuple[Tensor, Tensor]:
    outputs, states = zip(*steps)
    return torch.stack(outputs, dim=1), states[-1]


QKV = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V)}
SCALAR, CHANNEL = (B, T, HV), (B, T, HV, K)


def qkv(make: Callable[..., Tensor] = randn) -> dict[str, Tensor]:
    return {"q": randn(*QKV["q"]), "k": make(*QKV["k"]), "v": randn(*QKV["v"])}


def beta(*shape: int) -> Tensor:
    return randn(*shape).sigmoid()


def householder(g: bool) -> dict[str, Any]:
    return {
        "q": randn(B, T, H, K),
        "k": unit(B, 3 * T, H, K),
        "v": randn(B, 3 * T, HV, V),
        "g": log_decay(*SCALAR) if g else None,
        "beta": beta(B, 3 * T, HV),
    }


def slots(heads: int = H) -> dict[str, Tensor]:
    return {
        "q": randn(B, T, heads, K),
        "k": randn(B, T, H, K),
        "v": randn(B, T, H, V),
        "s": randn(B, T, H, M),
    }


def gsa(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor, Sk: Tensor, Sv: Tensor, scale: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    outputs = []
    for t in range(T):
        decay = g[:, t].exp()
        Sk = Sk * decay[:, :, None, :] + outer(k[:, t], s[:, t])
        Sv = Sv * decay[:, :, :, None] + outer(s[:, t], v[:, t])
        outputs.append(read(Sv, (scale * read(Sk, q[:, t])).softmax(-1)))
    return torch.stack(outputs, dim=1), (Sk, Sv)


SIZE = Size(B=B, T=T, H=H, HV=HV, K=K, V=V, M=M, dtype=torch.float64, gate="mixed")
NAMED = {"rwkv7", "dplr_delta_rule", "comba"}
# of two states, or of a scan of their own: tests/ops/test_operator_mappings.py has theirs
OTHERS = {"gsa", "hgrn", "mamba3", "rwkv4"}
# without the sums of a normaliser
ROWS = [x for x in LINEAR if family(x.op) not in OTHERS and x.variant in ("", "values")]


def arguments(name: str) -> dict[str, Tensor]:
    """Arguments of both forms of an operator, without a state."""
    row = next(x for x in LINEAR if x.name == f"chunk_{name}")
    return row.inputs(replace(SIZE, state=False))


def both(name: str) -> list[Callable[..., Any]]:
    return [getattr(ops, f"chunk_{name}"), getattr(ops, f"fused_recurrent_{name}")]


def near(got: Tensor, want: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def same(got: tuple[Tensor, Any], want: tuple[Tensor, Any], tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(flat(got), flat(want), rtol=tolerance, atol=tolerance)


def flat(outputs: tuple[Tensor, Any]) -> list[Tensor]:
    o, state = outputs
    return [o, *(state if isinstance(state, tuple) else [state])]
