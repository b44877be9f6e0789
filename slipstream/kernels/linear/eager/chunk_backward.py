"""Gradients of the chunkwise path, by hand (MATH.md), from the inputs alone.

A first pass keeps the state before each span. Then, from the last span to the first, the span is
computed again, and with do the gradient of o times scale and dS' that of the state after a chunk,
the scan back makes dx and dS, the gradient of the state before it:

    dx = scores(q, last write)^T do + to_state dS'
    dS = total dS' + from_state(q)^T do + right^T dx
    y  = inverse^T dx

Then do is the gradient of what q brings in, and y (dplr) or -beta y (delta) that of what the second
read does; the rest is three products for each read and write, and the gates.
"""

import torch
from torch import Tensor

from slipstream.kernels.linear.eager.chunk import Forward, prepare
from slipstream.kernels.linear.eager.gates import InputGrads, IntraGrads
from slipstream.kernels.linear.eager.layout import Carry, Layout
from slipstream.kernels.linear.eager.state_scan import state_scan, state_scan_in_place
from slipstream.kernels.linear.inputs import TOKEN_TERMS, LinearInputs


def chunk_backward(
    terms: LinearInputs, do: Tensor | None, dfinal: Tensor | None, scale: float, chunk: int
) -> dict[str, Tensor]:
    """Gradients by the name of the term, in its shape and dtype."""
    layout = Layout(terms, chunk)
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
        entry = state_scan(f.step, starts.pop(), span, reverse=False)
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


def _block_start_states(terms: LinearInputs, layout: Layout) -> list[Carry]:
    """The scan's state before each span."""
    carry, starts = layout.begin(terms.initial_state), []
    for span in layout.spans():
        starts.append(carry.copy())
        if span.start + span.steps < layout.steps:
            state_scan_in_place(prepare(terms, span).step, carry, span, None)
    return starts


def _block_backward(
    terms: LinearInputs, f: Forward, entry: Tensor, do: Tensor | None, dcarry: Carry, scale: float
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


def _state_scan_backward(f: Forward, do: Tensor, dcarry: Carry) -> tuple[list[Tensor], Tensor]:
    """do and y [n, C, V], if there is an x, and the gradient of the state after each chunk."""
    seen = do if f.value_gate is None else do * f.value_gate.from_start
    step = f.step._replace(add=f.span.by_step(f.query_from_state().mT @ seen))
    if f.inverse is None:
        return [do], state_scan(step, dcarry, f.span, reverse=True)
    rest = f.span.by_step(f.intra.scores[0][-1].mT @ do)
    step = step._replace(lhs=f.step.rhs, rhs=f.step.lhs, rest=rest)
    after = state_scan(step, dcarry, f.span, reverse=True)
    return [do, f.inverse.mT @ rest.view(do.shape)], after


def _log_total(f: Forward, entry: Tensor, after: Tensor) -> Tensor | None:
    """Gradient of the exponent of each channel's decay over the chunk, [n, K]."""
    if f.intra.total is None:
        return None
    products = entry * after if f.value_gate is None else entry * after * f.value_gate.total
    return products.sum(-1) * f.intra.total


def _boundaries_backward(
    f: Forward, entry: Tensor, douts: list[Tensor], after: Tensor
) -> IntraGrads:
    return IntraGrads(
        scores=[[dout @ values.mT for values in f.values()] for dout in douts],
        from_state=[dout @ entry.mT for dout in douts],
        to_state=[values @ after.mT for values in f.values()],
        log_total=_log_total(f, entry, after),
    )


def _beta_backward(f: Forward, y: Tensor, d: IntraGrads, grads: dict[str, Tensor]) -> None:
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
) -> IntraGrads:
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
    return IntraGrads(
        scores=[[dscores]],
        from_state=[seen @ entry.mT],
        to_state=[v_to_end @ after.mT],
        log_total=_log_total(f, entry, after),
    )


def _by_term(terms: LinearInputs, inputs: InputGrads, grads: dict[str, Tensor]) -> None:
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
