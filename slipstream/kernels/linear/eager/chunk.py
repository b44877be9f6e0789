"""The linear family chunk by chunk: everything in parallel over chunks but the walk of the state.

A token reads with r rows and writes w rows of K, each write with a row of V as its value:

    transition  reads             writes   values
    none        q                 k        v
    delta       q, -beta p        k        x,    x_i = beta_i v_i + (-beta_i p_i)^T D_i S_{i-1}
    dplr        q, a              k, b     v, x, x_i = a_i^T S_{i-1}

Inside a chunk x depends on itself: L x = rhs + from_state_1 S, with S the state before the chunk,
L = I - scores(row 1, last write) unit lower triangular, and rhs = beta v (delta) or scores(a, k) v
(dplr). So x = rest + right S, with rest = L^-1 rhs and right = L^-1 from_state_1, and

    S' = total S + to_state^T values
    o  = scale * (from_state_0 S + scores_0 values)

MATH.md has the backward pass. Shapes as in gates.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.eager.gates import ChannelGate, Intra, NoGate, ScalarGate
from slipstream.kernels.linear.eager.layout import Layout
from slipstream.kernels.linear.eager.values import ValueGate
from slipstream.kernels.linear.eager.walk import Step, walk
from slipstream.kernels.linear.terms import Terms

# exp of this is 0 in float64 too, and a chunk of it is still finite: stands in for a gate of -inf.
LOWEST_GATE = -1e4


class Rows(NamedTuple):
    """reads [n, C, r, K], writes [n, C, w, K]; v [n, C, V] and beta [n, C] as given."""

    reads: Tensor
    writes: Tensor
    v: Tensor
    beta: Tensor | None


class Forward(NamedTuple):
    """What the backward pass needs.

    values [n, C, w, V]; met [n, K, V], the state before each chunk; final [N, HV, K, V];
    step with x in place of rest; inverse: L^-1 [n, C, C].
    """

    layout: Layout
    rows: Rows
    gate: NoGate | ScalarGate | ChannelGate
    value_gate: ValueGate | None
    intra: Intra
    step: Step
    inverse: Tensor | None
    values: Tensor
    met: Tensor
    final: Tensor


def chunk_forward(terms: Terms, scale: float, chunk: int) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] in q's dtype and the final state [N, HV, K, V]."""
    f = run_forward(terms, chunk)
    n, C, w, V = f.values.shape
    scores, from_state = f.intra.scores[:, :, 0], f.intra.from_state[:, :, 0]
    if f.value_gate is None:
        o = torch.bmm(scores.reshape(n, C, C * w), f.values.view(n, C * w, V))
    else:
        o = f.value_gate.forward(scores[..., 0], f.rows.v)
        from_state = from_state.contiguous()
    if terms.u is not None:
        now = f.rows.reads[:, :, 0] * f.rows.writes[:, :, 0] * f.layout.by_head(terms.u)
        o.addcmul_(now.sum(-1, keepdim=True), f.rows.v)
    if f.value_gate is None:
        o.baddbmm_(from_state, f.met, beta=scale, alpha=scale)
    else:
        o.add_(torch.bmm(from_state, f.met).mul_(f.value_gate.from_start)).mul_(scale)
    return f.layout.merge(o, terms.v.shape, terms.q.dtype), f.final


def run_forward(terms: Terms, chunk: int) -> Forward:
    layout = Layout(terms, chunk)
    rows = split_rows(terms, layout)
    gate, value_gate = split_gates(terms, layout)
    intra = gate.forward(rows.reads, rows.writes)
    factors = Step(
        rows=None if intra.total is None else layout.by_step(intra.total),
        columns=None if value_gate is None else layout.by_step(value_gate.total),
    )
    if terms.transition == "none":
        kept = rows.v if value_gate is None else rows.v * value_gate.to_end
        step = factors._replace(add=layout.by_step(intra.to_state[:, :, 0].mT @ kept))
        inverse = None
    else:
        step, inverse = _recurrent_step(terms, rows, intra, factors, layout)
    met, final = walk(step, layout.start(terms.initial_state), layout, reverse=False)
    if step.rest is None:
        values = rows.v[:, :, None]
    else:
        x = step.rest.view(*rows.v.shape)
        values = x[:, :, None] if terms.a is None else torch.stack([rows.v, x], dim=2)
    return Forward(layout, rows, gate, value_gate, intra, step, inverse, values, met, final)


def split_rows(terms: Terms, layout: Layout) -> Rows:
    K = terms.q.shape[-1]
    two = terms.transition != "none"
    reads, v = layout.empty(2 if two else 1, K), layout.split(terms.v)
    layout.split(terms.q, out=reads[:, :, 0])
    writes = layout.empty(2 if terms.b is not None else 1, K)
    layout.split(terms.k, out=writes[:, :, 0])
    beta = None
    if terms.beta is not None:
        beta = layout.split(terms.beta)
        p = writes[:, :, 0] if terms.p is None else layout.split(terms.p)
        torch.mul(p, -beta[:, :, None], out=reads[:, :, 1])
    if terms.a is not None and terms.b is not None:
        layout.split(terms.a, out=reads[:, :, 1])
        layout.split(terms.b, out=writes[:, :, 1])
    return Rows(reads, writes, v, beta)


def split_gates(
    terms: Terms, layout: Layout
) -> tuple[NoGate | ScalarGate | ChannelGate, ValueGate | None]:
    kinds = ("after",) if terms.u is None else ("before",)
    if terms.transition != "none":
        kinds += ("strict",) if terms.a is None else ("before",)
    value_gate = None
    if terms.gv is not None:
        value_gate = ValueGate(layout.split(terms.gv).clamp_(min=LOWEST_GATE))
    if terms.g is None:
        return NoGate(kinds), value_gate
    g = layout.split(terms.g).clamp_(min=LOWEST_GATE)
    if g.dim() == 2 and "before" not in kinds:
        return ScalarGate(g, kinds), value_gate
    if g.dim() == 2:
        g = g[:, :, None].expand(-1, -1, terms.q.shape[-1]).contiguous()
    return ChannelGate(g, kinds), value_gate


def _recurrent_step(
    terms: Terms, rows: Rows, intra: Intra, factors: Step, layout: Layout
) -> tuple[Step, Tensor]:
    """The step of a delta or dplr transition, and L^-1."""
    second = intra.scores[:, :, 1]  # [n, C, C, w]
    lower = second[..., -1].neg()
    add = None
    if rows.beta is not None:
        rhs = rows.v * rows.beta[:, :, None]
    else:
        rhs = second[..., 0] @ rows.v
        add = layout.by_step(intra.to_state[:, :, 0].mT @ rows.v)
    eye = torch.eye(layout.chunk, dtype=layout.dtype, device=layout.device).expand_as(lower)
    inverse = torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)
    step = factors._replace(
        add=add,
        left=layout.by_step(intra.to_state[:, :, -1].contiguous()),
        right=layout.by_step(inverse @ intra.from_state[:, :, 1]),
        rest=layout.by_step(inverse @ rhs),
    )
    return step, inverse
