"""Packed sequences in spans of tokens, under Triton's interpreter, against the float64 reference.

As test_triton_scalar_decay_interpreted.py: the checks run in a process of their own, this file as a
script.
"""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slipstream.kernels.linear import op, workspace
from slipstream.kernels.linear.inputs import DIFFERENTIABLE, LinearInputs
from slipstream.kernels.linear.triton.plan import HAVE_TRITON
from tests.support.interpreted import PARTS, parts, run
from tests.support.linear_interpreted import reference
from tests.support.operators import offsets, relative_error

SCALE, CHUNK = 0.4, 64
# Of 64 tokens a span: many in one, one over many, ends at a border and next to it, none at all.
LENGTHS = {
    "few": (63, 1, 0, 65, 11),
    "many": (5, 0, 1, 58, 63, 65, 64, 1, 3),
    "long": (0, 230, 26),
    "one": (150,),
    "short of the end": (40, 90),
}
PAST = 7  # tokens of nobody after the last
# kind, lengths, spans, H, HV, states
CASES = {
    "sample": [
        ("delta_rule", "many", 8, 1, 1, True),
        ("gated", "short of the end", 8, 1, 1, False),
        ("kda", "few", 3, 1, 1, True),
        ("dplr", "one", 2, 1, 1, False),
    ],
    "further": [
        ("comba", "long", 3, 1, 2, False),
        ("gla", "few", 8, 1, 1, True),
        ("gated", "few", 8, 1, 2, True),
        ("comba", "one", 2, 1, 1, False),
        ("dplr", "long", 3, 1, 2, False),
    ],
}


def make(
    kind: str, lengths: tuple[int, ...], T: int, H: int, HV: int, states: bool
) -> LinearInputs:
    K, V = 16, 12
    q, k, p, a = (F.normalize(torch.randn(1, T, H, K), dim=-1) for _ in range(4))
    channels = (K,) if kind in ("kda", "dplr", "gla") else ()
    given: dict[str, Any] = {}
    if kind != "delta_rule":
        given["g"] = -torch.rand(1, T, HV, *channels)
    if kind in ("delta_rule", "gated", "comba", "kda"):
        given["beta"] = 2 * torch.rand(1, T, HV)
    if kind == "dplr":
        given |= {"a": a, "b": -0.5 * a + 0.1 * p}
    if kind == "comba":
        given["p"] = 0.7 * k + 0.3 * p
    if states:
        given["initial_state"] = torch.randn(len(lengths), HV, K, V)
    return LinearInputs(q, k, torch.randn(1, T, HV, V), **given, cu_seqlens=offsets(lengths).int())


def check(kind: str, name: str, count: int, H: int, HV: int, states: bool) -> None:
    lengths = LENGTHS[name]
    tokens = sum(lengths)
    terms = make(kind, lengths, tokens, H, HV, states)
    if name == "short of the end":  # what nobody may look at
        more = {
            n: torch.cat([x, torch.full_like(x[:, :PAST], float("nan"))], 1)
            for n, x in terms._asdict().items()
            if x is not None and n not in ("initial_state", "cu_seqlens")
        }
    else:
        more = {}
    (
        workspace.MIN_WORKSPACE_BYTES,
        workspace.MIN_SLICE_TOKENS,
        workspace.MIN_ACTIVE_PROGRAMS,
        workspace.MAX_SLICES,
        workspace.MAX_WORKSPACE_PCT,
    ) = 0, 1, 1, count, 0
    given = {n: x for n, x in terms._replace(**more)._asdict().items() if x is not None}
    live = {n: x.requires_grad_() for n, x in given.items() if n in DIFFERENTIABLE}
    ours = LinearInputs(**{**given, **live})
    spans = workspace.num_slices(ours, "triton")
    assert terms.transition == "none" or spans == count, spans
    o, final = op.linear(ours, SCALE, CHUNK, "triton")
    do, dfinal = torch.randn(1, tokens, HV, terms.v.shape[3]), torch.randn(final.shape)
    loss = (o[:, :tokens] * do).sum() + ((final * dfinal).sum() if states else 0)
    grads = dict(zip(live, torch.autograd.grad(loss, list(live.values()))))
    with torch.no_grad():
        alone = op.linear(ours, SCALE, CHUNK, "triton")
    want = reference(terms, SCALE, do, dfinal if states else None)
    for n, x in {"o": o, "final": final, **grads}.items():
        x = x.detach() if n in ("initial_state", "final") else x.detach()[:, :tokens]
        error = relative_error(x, want[n])
        assert error <= 4e-6, f"{kind}, {name}, {count} spans: {n} is off by {error:.1e}"
    for x, n in zip((alone[0][:, :tokens], alone[1]), ("o", "final")):
        assert relative_error(x, want[n]) <= 4e-6, f"{kind}, {name}: {n} without gradients"


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("part", PARTS)
def test_packed_spans_match_reference_when_interpreted(part: str) -> None:
    run(part, script="tests.kernels.linear.test_packed_slices")


if __name__ == "__main__":
    torch.manual_seed(int(os.environ.get("SEED", "0")))
    # NaN in whatever is never written
    torch.use_deterministic_algorithms(True)
    for part in parts():
        for case in CASES[part]:
            check(*case)
            print(*case, "ok", flush=True)
