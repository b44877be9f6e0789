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

Shapes as in gates.py. Gradients are made by hand (MATH.md), from the inputs alone: a first pass
keeps the state before each span. Then, from the last span to the first, the span is computed again,
and with do the gradient of o times scale and dS' that of the state after a chunk, the scan back
makes dx and dS, the gradient of the state before it:

    dx = scores(q, last write)^T do + to_state dS'
    dS = total dS' + from_state(q)^T do + right^T dx
    y  = inverse^T dx

Then do is the gradient of what q brings in, and y (dplr) or -beta y (delta) that of what the second
read does; the rest is three products for each read and write, and the gates.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.eager import gates
from slipstream.kernels.linear.eager import layout as layouts
from slipstream.kernels.linear.inputs import TOKEN_TERMS, LinearInputs

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

    span: layouts.ChunkBlock
    rows: Rows
    gate: gates.NoGate | gates.ScalarGate | gates.ChannelGate
    value_gate: gates.ValueGate | None
    intra: gates.Intra
    step: layouts.Step
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
    layout = layouts.Layout(terms, chunk)
    carry, o = layout.begin(terms.initial_state), layout.output(terms.v.shape, terms.q.dtype)
    for span in layout.spans():
        f = prepare(terms, span)
        seen = layouts.state_scan_in_place(f.step, carry, span, span.by_step(f.query_from_state()))
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


def prepare(terms: LinearInputs, span: layouts.ChunkBlock) -> Forward:
    """Computes what of a span does not depend on the state before it."""
    rows = _split_rows(terms, span)
    gate, value_gate = _split_gates(terms, span)
    intra = gate.forward(rows.reads, rows.writes)
    inverse = None
    step = layouts.Step(
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


def _split_rows(terms: LinearInputs, span: layouts.ChunkBlock) -> Rows:
    reads, writes, beta = [span.split(terms.q)], [span.split(terms.k)], None
    if terms.beta is not None:
        beta = span.split(terms.beta)[:, :, None]
        reads.append(writes[0] if terms.p is None else span.split(terms.p))
    if terms.a is not None and terms.b is not None:
        reads.append(span.split(terms.a))
        writes.append(span.split(terms.b))
    return Rows(reads, writes, span.split(terms.v), beta)


def _split_gates(
    terms: LinearInputs, span: layouts.ChunkBlock
) -> tuple[gates.NoGate | gates.ScalarGate | gates.ChannelGate, gates.ValueGate | None]:
    kinds = ("after",) if terms.u is None else ("before",)
    if terms.transition != "none":
        kinds += ("strict",) if terms.a is None and terms.p is None else ("before",)
    value_gate = None
    if terms.gv is not None:
        value_gate = gates.ValueGate(span.split(terms.gv).clamp_(min=LOWEST_GATE))
    if terms.g is None:
        return gates.NoGate(kinds), value_gate
    g = span.split(terms.g).clamp_(min=LOWEST_GATE)
    return (gates.ScalarGate if g.dim() == 2 else gates.ChannelGate)(g, kinds), value_gate


def _inverse(scores: Tensor, beta: Tensor | None) -> Tensor:
    """(I + beta M)^-1, or (I - M)^-1 without beta."""
    lower = scores.neg() if beta is None else scores * beta
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    return torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)


def _solve(
    inverse: Tensor,
    gate: gates.NoGate | gates.ScalarGate | gates.ChannelGate,
    rows: Rows,
    intra: gates.Intra,
) -> tuple[Tensor, Tensor]:
    """right [n, C, K] and rest [n, C, V] of x = rest + right S."""
    if rows.beta is None:
        return gate.from_state(rows.reads[1], 1, inverse), inverse @ (intra.scores[1][0] @ rows.v)
    by_beta = inverse * rows.beta.mT
    rest = by_beta @ rows.v
    return gate.from_state(rows.reads[1], 1, by_beta.neg_()), rest


def chunk_backward(
    terms: LinearInputs, do: Tensor | None, dfinal: Tensor | None, scale: float, chunk: int
) -> dict[str, Tensor]:
    """Gradients by the name of the term, in its shape and dtype."""
    layout = layouts.Layout(terms, chunk)
    starts = _block_start_states(terms, layout)
    dcarry = layout.begin(dfinal)
    out = {
        name: layout.output(x.shape, x.dtype)
        for name in TOKEN_TERMS
        if (x := getattr(terms, name)) is not None
    }
    du = []
    for span in layout.spans(reverse=True):
        f = prepare(terms, span)
        entry = layouts.state_scan(f.step, starts.pop(), span, reverse=False)
        grads = _block_backward(terms, f, entry, do, dcarry, scale)
        if terms.u is not None:
            du.append(grads.pop("u"))
        for name, x in grads.items():
            span.merge(x, out[name])
    out = {name: layout.finish(x) for name, x in out.items()}
    if terms.u is not None:
        out["u"] = torch.stack(du).sum(0).to(terms.u.dtype)
    if terms.initial_state is not None:
        out["initial_state"] = layout.end(dcarry).to(terms.initial_state.dtype)
    return out


def _block_start_states(terms: LinearInputs, layout: layouts.Layout) -> list[layouts.Carry]:
    """The scan's state before each span."""
    carry, starts = layout.begin(terms.initial_state), []
    for span in layout.spans():
        starts.append(carry.copy())
        if span.start + span.steps < layout.steps:
            layouts.state_scan_in_place(prepare(terms, span).step, carry, span, None)
    return starts


def _block_backward(
    terms: LinearInputs,
    f: Forward,
    entry: Tensor,
    do: Tensor | None,
    dcarry: layouts.Carry,
    scale: float,
) -> dict[str, Tensor]:
    """Gradients of a span's rows [n, C, ...], that of u [HV, K]; `dcarry` goes back over it.

    entry [n, K, V]: the state before each chunk.
    """
    do = f.span.split(terms.v.new_zeros(()).expand(terms.v.shape) if do is None else do).mul_(scale)
    douts, after = _state_scan_backward(f, do, dcarry)
    grads = {}
    if f.value_gate is None:
        d = _boundaries_backward(f, entry, douts, after)
    else:
        d = _boundaries_backward_with_value_gate(f, entry, do, after, grads)
    if f.rows.beta is not None:
        _beta_backward(f, douts[1], d, grads)
    elif f.value_gate is None:
        dv = f.intra.to_state[0] @ after
        for row, dout in zip(f.intra.scores, douts):
            dv.baddbmm_(row[0].mT, dout)
        grads["v"] = dv
    inputs = f.gate.backward(f.rows.reads, f.rows.writes, f.intra, d)
    _by_term(terms, inputs, grads)
    if terms.u is not None:
        _add_bonus(terms, f, do, grads)
    return grads


def _state_scan_backward(
    f: Forward, do: Tensor, dcarry: layouts.Carry
) -> tuple[list[Tensor], Tensor]:
    """do and y [n, C, V], if there is an x, and the gradient of the state after each chunk."""
    seen = do if f.value_gate is None else do * f.value_gate.from_start
    step = f.step._replace(add=f.span.by_step(f.query_from_state().mT @ seen))
    if f.inverse is None:
        return [do], layouts.state_scan(step, dcarry, f.span, reverse=True)
    rest = f.span.by_step(f.intra.scores[0][-1].mT @ do)
    step = step._replace(lhs=f.step.rhs, rhs=f.step.lhs, rest=rest)
    after = layouts.state_scan(step, dcarry, f.span, reverse=True)
    return [do, f.inverse.mT @ rest.view(do.shape)], after


def _log_total(f: Forward, entry: Tensor, after: Tensor) -> Tensor | None:
    """Gradient of the exponent of each channel's decay over the chunk, [n, K]."""
    if f.intra.total is None:
        return None
    products = entry * after if f.value_gate is None else entry * after * f.value_gate.total
    return products.sum(-1) * f.intra.total


def _boundaries_backward(
    f: Forward, entry: Tensor, douts: list[Tensor], after: Tensor
) -> gates.IntraGrads:
    return gates.IntraGrads(
        scores=[[dout @ values.mT for values in f.values()] for dout in douts],
        from_state=[dout @ entry.mT for dout in douts],
        to_state=[values @ after.mT for values in f.values()],
        log_total=_log_total(f, entry, after),
    )


def _beta_backward(f: Forward, y: Tensor, d: gates.IntraGrads, grads: dict[str, Tensor]) -> None:
    """x = beta e with e = v - from_state(p) S - M x, of which y is the gradient before beta.

    Turns the gradients of the second read's scores and from_state from y's to -beta y's.
    """
    beta = f.rows.beta
    assert beta is not None
    dscores, dfrom_state = d.scores[1][0], d.from_state[1]
    seen = (dscores * f.intra.scores[1][0]).sum(-1)  # y . M x
    seen += (dfrom_state * f.gate.from_state(f.rows.reads[1], 1)).sum(-1)
    grads["beta"] = (y * f.rows.v).sum(-1) - seen
    grads["v"] = y * beta
    dscores.mul_(-beta)
    dfrom_state.mul_(-beta)


def _boundaries_backward_with_value_gate(
    f: Forward, entry: Tensor, do: Tensor, after: Tensor, grads: dict[str, Tensor]
) -> gates.IntraGrads:
    """The same where the columns of the state decay too; also the gradients of v and gv."""
    gate, v, scores = f.value_gate, f.rows.v, f.intra.scores[0][0]
    assert gate is not None
    seen = do * gate.from_start
    v_to_end = v * gate.to_end
    dkept = f.intra.to_state[0] @ after
    dtotal = entry * after
    if f.intra.total is not None:
        dtotal *= f.intra.total[:, :, None]
    dscores, dv, grads["gv"] = gate.backward(
        scores,
        v,
        do,
        leave=seen * (f.query_from_state() @ entry),
        enter=v_to_end * dkept,
        dtotal=dtotal.sum(1) * gate.total[:, 0],
    )
    grads["v"] = dv.addcmul_(dkept, gate.to_end)
    return gates.IntraGrads(
        scores=[[dscores]],
        from_state=[seen @ entry.mT],
        to_state=[v_to_end @ after.mT],
        log_total=_log_total(f, entry, after),
    )


def _by_term(terms: LinearInputs, inputs: gates.InputGrads, grads: dict[str, Tensor]) -> None:
    grads["q"], grads["k"] = inputs.reads[0], inputs.writes[0]
    if terms.a is not None:
        grads["a"], grads["b"] = inputs.reads[1], inputs.writes[1]
    elif terms.p is not None:
        grads["p"] = inputs.reads[1]
    elif terms.beta is not None:
        grads["k"] = inputs.writes[0] + inputs.reads[1]
    if terms.g is not None and inputs.g is not None:
        grads["g"] = inputs.g


def _add_bonus(terms: LinearInputs, f: Forward, do: Tensor, grads: dict[str, Tensor]) -> None:
    """o_i has the term (q_i . (u k_i)) v_i."""
    assert terms.u is not None
    q, k, v, u = f.rows.reads[0], f.rows.writes[0], f.rows.v, f.span.by_head(terms.u)
    c = (q * k * u).sum(-1, keepdim=True)
    dc = (do * v).sum(-1, keepdim=True)
    grads["v"] = grads["v"].addcmul(c, do)
    grads["q"] = grads["q"].addcmul(dc, u * k)
    grads["k"] = grads["k"].addcmul(dc, u * q)
    heads = f.span.layout.heads
    grads["u"] = (dc * q * k).view(-1, heads, f.span.chunk, q.shape[-1]).sum((0, 2))
