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
from slipstream.kernels.linear.eager.layout import Carry, Layout, Span
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
    """A span computed: what its output and the backward pass need.

    values [n, C, w, V]; met [n, K, V], the state before each chunk; step with x in place of rest;
    inverse: L^-1 [n, C, C].
    """

    span: Span
    rows: Rows
    gate: NoGate | ScalarGate | ChannelGate
    value_gate: ValueGate | None
    intra: Intra
    step: Step
    inverse: Tensor | None
    values: Tensor
    met: Tensor


def chunk_forward(terms: Terms, scale: float, chunk: int) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] in q's dtype and the final state [N, HV, K, V]."""
    layout = Layout(terms, chunk)
    carry, o = layout.begin(terms.initial_state), layout.output(terms.v.shape, terms.q.dtype)
    for span in layout.spans():
        span.merge(_output(run_forward(terms, span, carry), terms, scale), o)
    return layout.finish(o), layout.end(carry)


def _output(f: Forward, terms: Terms, scale: float) -> Tensor:
    n, C, w, V = f.values.shape
    scores, from_state = f.intra.scores[:, :, 0], f.intra.from_state[:, :, 0]
    if f.value_gate is None:
        o = torch.bmm(scores.reshape(n, C, C * w), f.values.view(n, C * w, V))
    else:
        o = f.value_gate.forward(scores[..., 0], f.rows.v)
    if terms.u is not None:
        now = f.rows.reads[:, :, 0] * f.rows.writes[:, :, 0] * f.span.by_head(terms.u)
        o.addcmul_(now.sum(-1, keepdim=True), f.rows.v)
    if f.value_gate is None:
        return o.baddbmm_(from_state, f.met, beta=scale, alpha=scale)
    return o.add_((from_state @ f.met).mul_(f.value_gate.from_start)).mul_(scale)


def run_forward(terms: Terms, span: Span, carry: Carry) -> Forward:
    """Computes a span from the state in `carry` and leaves the state after it there."""
    rows = split_rows(terms, span)
    gate, value_gate = split_gates(terms, span)
    intra = gate.forward(rows.reads, rows.writes)
    factors = Step(
        rows=None if intra.total is None else span.by_step(intra.total),
        columns=None if value_gate is None else span.by_step(value_gate.total),
    )
    if terms.transition == "none":
        kept = rows.v if value_gate is None else rows.v * value_gate.to_end
        step = factors._replace(add=span.by_step(intra.to_state[:, :, 0].mT @ kept))
        inverse = None
    else:
        step, inverse = _recurrent_step(rows, intra, factors, span)
    met = walk(step, carry, span, reverse=False)
    if step.rest is None:
        values = rows.v[:, :, None]
    else:
        x = step.rest.view(rows.v.shape)
        values = x[:, :, None] if terms.a is None else torch.stack([rows.v, x], dim=2)
    return Forward(span, rows, gate, value_gate, intra, step, inverse, values, met)


def split_rows(terms: Terms, span: Span) -> Rows:
    K = terms.q.shape[-1]
    two = terms.transition != "none"
    reads, v = span.empty(2 if two else 1, K), span.split(terms.v)
    span.split(terms.q, out=reads[:, :, 0])
    writes = span.empty(2 if terms.b is not None else 1, K)
    span.split(terms.k, out=writes[:, :, 0])
    beta = None
    if terms.beta is not None:
        beta = span.split(terms.beta)
        p = writes[:, :, 0] if terms.p is None else span.split(terms.p)
        torch.mul(p, -beta[:, :, None], out=reads[:, :, 1])
    if terms.a is not None and terms.b is not None:
        span.split(terms.a, out=reads[:, :, 1])
        span.split(terms.b, out=writes[:, :, 1])
    return Rows(reads, writes, v, beta)


def split_gates(
    terms: Terms, span: Span
) -> tuple[NoGate | ScalarGate | ChannelGate, ValueGate | None]:
    kinds = ("after",) if terms.u is None else ("before",)
    if terms.transition != "none":
        kinds += ("strict",) if terms.a is None else ("before",)
    value_gate = None
    if terms.gv is not None:
        value_gate = ValueGate(span.split(terms.gv).clamp_(min=LOWEST_GATE))
    if terms.g is None:
        return NoGate(kinds), value_gate
    g = span.split(terms.g).clamp_(min=LOWEST_GATE)
    if g.dim() == 2 and "before" not in kinds:
        return ScalarGate(g, kinds), value_gate
    if g.dim() == 2:
        g = g[:, :, None].expand(-1, -1, terms.q.shape[-1]).contiguous()
    return ChannelGate(g, kinds), value_gate


def _recurrent_step(rows: Rows, intra: Intra, factors: Step, span: Span) -> tuple[Step, Tensor]:
    """The step of a delta or dplr transition, and L^-1."""
    second = intra.scores[:, :, 1]  # [n, C, C, w]
    lower = second[..., -1].neg()
    add = None
    if rows.beta is not None:
        rhs = rows.v * rows.beta[:, :, None]
    else:
        rhs = second[..., 0] @ rows.v
        add = span.by_step(intra.to_state[:, :, 0].mT @ rows.v)
    eye = torch.eye(span.chunk, dtype=lower.dtype, device=lower.device).expand_as(lower)
    inverse = torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)
    step = factors._replace(
        add=add,
        left=span.by_step(intra.to_state[:, :, -1].contiguous()),
        right=span.by_step(inverse @ intra.from_state[:, :, 1]),
        rest=span.by_step(inverse @ rhs),
    )
    return step, inverse
