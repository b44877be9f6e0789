"""The linear family chunk by chunk: everything in parallel over chunks but the scan of the state.

    transition  reads   writes   values
    none        q       k        v
    delta       q, k    k        x,    x_i = beta_i (v_i - k_i^T D_i S_{i-1})
                q, p    k        x,    x_i = beta_i (v_i - p_i^T S_{i-1})
    dplr        q, a    k, b     v, x, x_i = a_i^T S_{i-1}

Inside a chunk x depends on itself. With S the state before the chunk and M the scores of the second
read against the write that carries x,

    delta       (I + beta M) x = beta (v - from_state(p) S)    p = k if there is none
    dplr        (I - M) x      = scores(a, k) v + from_state(a) S

so x = rest + right S, where rest and right come from the inverse of a unit lower triangular matrix,
and

    S' = total S + sum of to_state^T values
    o  = scale * (from_state(q) S + sum of scores(q) values)

MATH.md has the backward pass. Shapes as in gates.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.eager.gates import ChannelGate, Intra, NoGate, ScalarGate
from slipstream.kernels.linear.eager.layout import ChunkBlock, Layout
from slipstream.kernels.linear.eager.state_scan import Step, state_scan_in_place
from slipstream.kernels.linear.eager.value_decay import ValueGate
from slipstream.kernels.linear.inputs import LinearInputs

# exp of this is 0 in float64 too, and a chunk of it is still finite: stands in for a gate of -inf.
LOWEST_GATE = -1e4


class Rows(NamedTuple):
    """reads and writes [n, C, K] each; v [n, C, V] and beta [n, C, 1] as given."""

    reads: list[Tensor]
    writes: list[Tensor]
    v: Tensor
    beta: Tensor | None


class Forward(NamedTuple):
    """A span computed except for the scan.

    step: the scan's, whose rest the scan turns into x; inverse [n, C, C] of the matrix before x.
    """

    span: ChunkBlock
    rows: Rows
    gate: NoGate | ScalarGate | ChannelGate
    value_gate: ValueGate | None
    intra: Intra
    step: Step
    inverse: Tensor | None

    def values(self) -> list[Tensor]:
        """After the scan: what each write carries, [n, C, V]."""
        values = [self.rows.v] if self.rows.beta is None else []
        if self.step.rest is not None:
            values.append(self.step.rest.view(self.rows.v.shape))
        return values

    def query_from_state(self) -> Tensor:
        return self.gate.from_state(self.rows.reads[0], 0)


def chunk_forward(terms: LinearInputs, scale: float, chunk: int) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] in q's dtype and the final state [N, HV, K, V]."""
    layout = Layout(terms, chunk)
    carry, o = layout.begin(terms.initial_state), layout.output(terms.v.shape, terms.q.dtype)
    for span in layout.spans():
        f = prepare(terms, span)
        seen = state_scan_in_place(f.step, carry, span, span.by_step(f.query_from_state()))
        assert seen is not None
        span.merge(_output(f, seen, terms, scale), o)
    return layout.finish(o), layout.end(carry)


def _output(f: Forward, seen: Tensor, terms: LinearInputs, scale: float) -> Tensor:
    """seen [n, C, V], what the queries see of the state before the chunk, becomes the output."""
    scores, values = f.intra.scores[0], f.values()
    o = seen if f.value_gate is None else seen.mul_(f.value_gate.from_start)
    if terms.u is not None:
        now = f.rows.reads[0] * f.rows.writes[0] * f.span.by_head(terms.u)
        o.addcmul_(now.sum(-1, keepdim=True), f.rows.v)
    if f.value_gate is not None:
        return o.add_(f.value_gate.forward(scores[0], f.rows.v)).mul_(scale)
    for w, (score, value) in enumerate(zip(scores, values)):
        o.baddbmm_(score, value, beta=scale if w == 0 else 1.0, alpha=scale)
    return o


def prepare(terms: LinearInputs, span: ChunkBlock) -> Forward:
    """Computes what of a span does not depend on the state before it."""
    rows = _split_rows(terms, span)
    gate, value_gate = _split_gates(terms, span)
    intra = gate.forward(rows.reads, rows.writes)
    inverse = None
    step = Step(
        rows=None if intra.total is None else span.by_step(intra.total[:, :, None]),
        columns=None if value_gate is None else span.by_step(value_gate.total),
    )
    if terms.transition != "delta":
        v_to_end = rows.v if value_gate is None else rows.v * value_gate.to_end
        step = step._replace(add=span.by_step(intra.to_state[0].mT @ v_to_end))
    if terms.transition != "none":
        inverse = _inverse(intra.scores[1][-1], rows.beta)
        rhs, rest = _solve(inverse, gate, rows, intra)
        step = step._replace(
            lhs=span.by_step(intra.to_state[-1]), rhs=span.by_step(rhs), rest=span.by_step(rest)
        )
    return Forward(span, rows, gate, value_gate, intra, step, inverse)


def _split_rows(terms: LinearInputs, span: ChunkBlock) -> Rows:
    reads, writes, beta = [span.split(terms.q)], [span.split(terms.k)], None
    if terms.beta is not None:
        beta = span.split(terms.beta)[:, :, None]
        reads.append(writes[0] if terms.p is None else span.split(terms.p))
    if terms.a is not None and terms.b is not None:
        reads.append(span.split(terms.a))
        writes.append(span.split(terms.b))
    return Rows(reads, writes, span.split(terms.v), beta)


def _split_gates(
    terms: LinearInputs, span: ChunkBlock
) -> tuple[NoGate | ScalarGate | ChannelGate, ValueGate | None]:
    kinds = ("after",) if terms.u is None else ("before",)
    if terms.transition != "none":
        kinds += ("strict",) if terms.a is None and terms.p is None else ("before",)
    value_gate = None
    if terms.gv is not None:
        value_gate = ValueGate(span.split(terms.gv).clamp_(min=LOWEST_GATE))
    if terms.g is None:
        return NoGate(kinds), value_gate
    g = span.split(terms.g).clamp_(min=LOWEST_GATE)
    return (ScalarGate if g.dim() == 2 else ChannelGate)(g, kinds), value_gate


def _inverse(scores: Tensor, beta: Tensor | None) -> Tensor:
    """(I + beta M)^-1, or (I - M)^-1 without beta."""
    lower = scores.neg() if beta is None else scores * beta
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    return torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)


def _solve(
    inverse: Tensor, gate: NoGate | ScalarGate | ChannelGate, rows: Rows, intra: Intra
) -> tuple[Tensor, Tensor]:
    """right [n, C, K] and rest [n, C, V] of x = rest + right S."""
    if rows.beta is None:
        return gate.from_state(rows.reads[1], 1, inverse), inverse @ (intra.scores[1][0] @ rows.v)
    by_beta = inverse * rows.beta.mT
    rest = by_beta @ rows.v
    return gate.from_state(rows.reads[1], 1, by_beta.neg_()), rest
