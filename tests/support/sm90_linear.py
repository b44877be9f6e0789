"""Calls of the linear family's back ends for sm_90 in the emulator: inputs, what is wanted."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear import segments
from slipstream.kernels.linear.inputs import DIFFERENTIABLE, TOKEN_TERMS, LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from tests.gluon_emulator import linear as emulator

C, SCALE = 64, 0.3
SM90 = "slipstream.kernels.linear.sm90."
FOLDERS = {"delta": "delta", "simple": "scalar_decay", "gla": "vector_decay"}  # others: dplr


def backend(kind: str) -> Any:
    folder = FOLDERS.get(kind, "dplr")
    return importlib.import_module(f"{SM90}{folder}.backend")


def cut_by(tokens: int) -> Callable[..., set[str]]:
    """Cuts sequences of gla, kda and dplr into segments of that length, in the forward."""

    def cut(self: Any, terms: LinearInputs, unit: int = segments.FORWARD_UNIT) -> Any:
        return (
            segments.split_into_segments(terms, tokens) if unit == segments.FORWARD_UNIT else None
        )

    def chosen(monkeypatch: pytest.MonkeyPatch) -> set[str]:
        for kind in ("gla", "kda"):
            monkeypatch.setattr(type(backend(kind).BACKEND), "choose_segments", cut)
        return set()

    return chosen


def fused_by(tokens: int | None = None) -> Callable[..., set[str]]:
    """KDA's forward in one kernel, cut into segments if their tokens are given, and the delta
    rule's."""

    def chosen(monkeypatch: pytest.MonkeyPatch) -> set[str]:
        cut = lambda terms: segments.split_into_segments(terms, tokens)  # noqa: E731
        monkeypatch.setattr(segments, "uses_fused_fwd", lambda terms: True)
        monkeypatch.setattr(segments, "fused_fwd_sm90", cut)
        monkeypatch.setattr(type(backend("delta").BACKEND), "fuses", lambda self, terms: True)
        # of heads with strong gates, which the second launch repeats, the first's are not finite
        monkeypatch.setattr(emulator, "INPUTS_HAVE_NAN", True)
        return {"kda_fused_fwd"}

    return chosen


def _tokens(g: Tensor, some: list[int], gate: float) -> Tensor:
    g[:, some] = gate
    return g


def all_kinds(x: Tensor) -> Tensor:
    """Gates of 0, weak and strong ones, and -inf."""
    x = torch.where(x < 0.8, -x, -50 * x)
    return torch.where(x < -49, -torch.inf, torch.where(x > -0.2, 0.0, x))


def _quarters(first: int, strong: float) -> Any:
    """Every other quarter, or half, of a chunk, from `first` on in each 32 tokens."""
    here = (torch.arange(C) % 32 // 16 == first)[:, None, None]
    return lambda x: torch.where(here, strong, -0.1 * x)


# of numbers from 0 to 1
GATES: dict[str, Any] = {
    "own": torch.neg,
    "weak": lambda x: -0.1 * x,
    **{f"to {n}": lambda x, n=n: -n * x for n in (0.1, 0.3, 4, 5, 9, 50, 90)},
    **{str(n): lambda x, n=n: 0 * x + n for n in (-1, -2, -5, -7, -20, -torch.inf)},
    "last -5": lambda x: torch.where(torch.arange(x.shape[-1]) < x.shape[-1] // 2, -0.1 * x, -5),
    # of one channel -87 in 16 tokens, where kda's one kernel begins to be strong; another is so
    "at the bound": lambda x: torch.cat(
        [0 * x[..., :1] - 87 / 16, -20 - x[..., 1:2], -0.1 * x[..., 2:]], -1
    ),
    "resets": lambda x: torch.where(x < 0.05, -torch.inf, -0.3 * x),
    "huge": lambda x: torch.where(x < 0.02, -1e4, -0.1 * x),
    "mixed": lambda x: torch.where(x < 0.2, -250 * x, -0.1 * x),
    # of every third 64 tokens what was before them does not count
    "by blocks": lambda x: torch.where(
        (torch.arange(x.shape[1]) // C % 3 == 1)[:, None, None].to(x.device), -x, -0.02 * x
    ),
    "some 0": lambda x: torch.where(x < 0.3, 0.0, -9 * x),
    "all kinds": all_kinds,
    "a token of -200": lambda x: _tokens(0 * x, [37], -200.0),
    "-200 and 0": lambda x: torch.where(x < 0.5, -200.0, 0.0),
    "three of -inf": lambda x: _tokens(-0.1 * x, [70, 71, 127], -torch.inf),
    # of one chunk: a half, or every other quarter, near 2^-160; growth by 2^12 in the second half
    "half": lambda x: torch.where(torch.arange(C)[:, None, None] < 32, -3.4, -0.1 * x),
    "quarters": _quarters(0, -6.9),
    "between": _quarters(1, -6.9),
    "above 0": lambda x: torch.where(torch.arange(C)[:, None, None] // 28 == 1, 0.3, -0.1 * x),
    "peaks": lambda x: torch.where(torch.arange(C)[:, None, None] % 7 == 3, -50.0, -0.1 * x),
}


def inputs(
    kind: str, size: tuple, batch: int | tuple = 1, gates: str = "own", state: bool = True,
    seed: int = 0, before: bool = False,
) -> LinearInputs:  # fmt: skip
    """Past the last sequence of packed ones is NaN.

    Args:
        kind: delta or simple, of a gate a token, none if `gates` is ""; gla, kda, gdn2 or dplr.
        size: T, H, HV, K, V. batch: rows, or the lengths of packed sequences.
        before: with u, of gla.
    """
    T, H, HV, K, V = size
    lengths: Any = batch if isinstance(batch, tuple) else None
    B: Any = 1 if lengths else batch
    N = len(lengths) if lengths else B
    torch.manual_seed(seed)
    f: dict[str, Any] = {"dtype": torch.float64}
    k, a = (torch.nn.functional.normalize(torch.randn(B, T, H, K, **f), dim=-1) for _ in "ka")
    wide = () if kind in ("delta", "simple") else (K,)
    by_channel, free = kind == "gdn2", kind == "dplr"
    terms = LinearInputs(
        torch.randn(B, T, H, K, **f),
        k,
        torch.randn(B, T, HV, V, **f),
        g=GATES[gates](torch.rand(B, T, HV, *wide, **f)) if gates else None,
        beta=2 * torch.rand(B, T, HV, **f) if kind in ("delta", "kda") else None,
        erase=2 * torch.rand(B, T, HV, K, **f) if by_channel else None,
        write=torch.rand(B, T, HV, V, **f) if by_channel else None,
        a=a if free else None,
        b=-a * torch.rand(B, T, H, 1, **f) if free else None,
        u=torch.randn(HV, K, **f) if before else None,
        initial_state=torch.randn(N, HV, K, V, **f) if state else None,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int() if lengths else None,
    )
    if lengths:
        terms.of_tokens(lambda x: x[:, sum(lengths) :].fill_(torch.nan))
    return terms


def end_of(terms: LinearInputs) -> int:
    """The token after the last sequence's last."""
    return terms.v.shape[1] if terms.cu_seqlens is None else int(terms.cu_seqlens[-1])


def wanted(terms: LinearInputs, do: Tensor, dfinal: Tensor) -> dict[str, Tensor]:
    """The reference's o and final states, and its gradients."""
    end = end_of(terms)
    start = torch.zeros_like(dfinal) if terms.initial_state is None else terms.initial_state
    whole = terms.of_tokens(lambda x: x[:, :end])._replace(initial_state=start)
    live = {
        n: x.clone().requires_grad_()
        for n in DIFFERENTIABLE
        if (x := getattr(whole, n)) is not None
    }
    o, final = linear_reference(whole._replace(**live), SCALE)
    loss = (o * do[:, :end]).sum() + (final * dfinal).sum()
    grads = torch.autograd.grad(loss, [*live.values()])
    return dict(zip(live, grads, strict=True)) | {"o": o.detach(), "final": final.detach()}


def near(got: Tensor, want: Tensor, name: str = "", bar: float = 1e-8) -> None:
    torch.testing.assert_close(got, want.detach(), rtol=bar, atol=bar, msg=lambda x: f"{name}: {x}")


def in_dtype(terms: LinearInputs, dtype: torch.dtype = torch.bfloat16) -> LinearInputs:
    """Numbers that dtype and, of gates and beta, float32 have."""
    exact = terms.of_tokens(lambda x: x.to(dtype).double())
    wide = {n: x.float().double() for n in ("g", "beta") if (x := getattr(terms, n)) is not None}
    return exact._replace(**wide)


def mixed(terms: LinearInputs, future: LinearInputs, cut: int) -> LinearInputs:
    """The tokens of `future` from `cut` on."""
    pairs = {n: (getattr(terms, n), getattr(future, n)) for n in TOKEN_TERMS}
    given = {n: x for n, x in pairs.items() if x[0] is not None}
    return terms._replace(
        **{n: torch.cat([x[:, :cut], y[:, cut:]], 1) for n, (x, y) in given.items()}
    )
