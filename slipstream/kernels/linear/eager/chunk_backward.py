"""Gradients of the chunkwise path, by hand (MATH.md), from the inputs alone.

A first pass keeps the state before each span. Then, from the last span to the first, the span is
computed again, and with do the gradient of o times scale and dS' that of the state after a chunk,
the walk back makes dx and dS, the gradient of the state before it:

    dx = scores(q, last write)^T do + to_state dS'
    dS = total dS' + from_state_0^T do + right^T dx
    y  = L^-T dx

Then do and y are the gradients of what rows 0 and 1 of the reads bring in, and the rest is three
products and the gates.
"""

import torch
from torch import Tensor

from slipstream.kernels.linear.eager.chunk import Forward, run_forward
from slipstream.kernels.linear.eager.gates import InputGrads, IntraGrads
from slipstream.kernels.linear.eager.layout import Carry, Layout
from slipstream.kernels.linear.eager.walk import walk
from slipstream.kernels.linear.terms import DIFFERENTIABLE, Terms


def chunk_backward(
    terms: Terms, do: Tensor | None, dfinal: Tensor | None, scale: float, chunk: int
) -> dict[str, Tensor]:
    """Gradients by the name of the term, in its shape and dtype."""
    layout = Layout(terms, chunk)
    starts = _span_starts(terms, layout)
    dcarry = layout.begin(dfinal)
    out = {
        name: layout.output(x.shape, x.dtype)
        for name in DIFFERENTIABLE
        if (x := getattr(terms, name)) is not None and name not in ("u", "initial_state")
    }
    du = []
    for span in layout.spans(reverse=True):
        f = run_forward(terms, span, starts.pop())
        grads = _span_backward(terms, f, do, dcarry, scale)
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


def _span_starts(terms: Terms, layout: Layout) -> list[Carry]:
    """What the walk carries into each span."""
    carry, starts = layout.begin(terms.initial_state), []
    for span in layout.spans():
        starts.append(carry.copy())
        if span.start + span.steps < layout.steps:
            run_forward(terms, span, carry)
    return starts


def _span_backward(
    terms: Terms, f: Forward, do: Tensor | None, dcarry: Carry, scale: float
) -> dict[str, Tensor]:
    """Gradients of a span's rows [n, C, ...], that of u [HV, K]; `dcarry` goes back over it."""
    do = f.span.split(terms.v.new_zeros(()).expand(terms.v.shape) if do is None else do).mul_(scale)
    douts, after = _walk_back(f, do, dcarry)
    if f.value_gate is None:
        d, dv = _chunk_back(f, douts, after)
        dgv = None
    else:
        d, dv, dgv = _chunk_back_with_value_gate(f, do, after)
    inputs = f.gate.backward(f.rows.reads, f.rows.writes, f.intra, d)
    grads = _by_term(terms, f, inputs, dv, dgv)
    if terms.u is not None:
        _add_bonus(terms, f, do, grads)
    return grads


def _walk_back(f: Forward, do: Tensor, dcarry: Carry) -> tuple[Tensor, Tensor]:
    """(do, y) [n, C, r, V] and the gradient of the state after each chunk [n, K, V]."""
    from_state = f.intra.from_state[:, :, 0]
    seen = do if f.value_gate is None else do * f.value_gate.from_start
    step = f.step._replace(add=f.span.by_step(from_state.mT @ seen))
    if f.inverse is not None:
        rest = f.intra.scores[:, :, 0, :, -1].mT @ do
        step = step._replace(
            left=f.step.right, right=f.step.left, rest=f.span.by_step(rest.contiguous())
        )
    after = walk(step, dcarry, f.span, reverse=True)
    if f.inverse is None:
        return do[:, :, None], after
    assert step.rest is not None
    dx = step.rest.view(do.shape)
    return torch.stack([do, f.inverse.mT @ dx], dim=2), after


def _log_total(f: Forward, after: Tensor) -> Tensor | None:
    """Gradient of the exponent of each channel's decay over the chunk, [n, K]."""
    if f.intra.total is None:
        return None
    kept = f.met * after if f.value_gate is None else f.met * after * f.value_gate.total
    return kept.sum(-1) * f.intra.total[..., 0]


def _chunk_back(f: Forward, douts: Tensor, after: Tensor) -> tuple[IntraGrads, Tensor]:
    n, C, r, V = douts.shape
    dout_rows, value_rows = douts.reshape(n, C * r, V), f.values.reshape(n, -1, V)
    if f.rows.beta is not None:
        dv = douts[:, :, 1]  # y, the gradient of rhs = beta v
    else:  # v is a value of its own
        dv = torch.bmm(f.intra.to_state[:, :, 0], after)
        dv.baddbmm_(f.intra.scores[..., 0].reshape(n, C * r, C).mT, dout_rows)
    d = IntraGrads(
        scores=torch.bmm(dout_rows, value_rows.mT).view(f.intra.scores.shape),
        from_state=torch.bmm(dout_rows, f.met.mT).view_as(f.rows.reads),
        to_state=torch.bmm(value_rows, after.mT).view_as(f.rows.writes),
        log_total=_log_total(f, after),
    )
    return d, dv


def _chunk_back_with_value_gate(
    f: Forward, do: Tensor, after: Tensor
) -> tuple[IntraGrads, Tensor, Tensor]:
    gate, v, scores = f.value_gate, f.rows.v, f.intra.scores[:, :, 0, :, 0]
    assert gate is not None
    seen = do * gate.from_start
    kept = v * gate.to_end
    dkept = f.intra.to_state[:, :, 0] @ after
    dtotal = f.met * after if f.intra.total is None else f.met * after * f.intra.total
    dscores, dv, dgv = gate.backward(
        scores,
        v,
        do,
        leave=seen * (f.intra.from_state[:, :, 0] @ f.met),
        enter=kept * dkept,
        dtotal=dtotal.sum(1) * gate.total[:, 0],
    )
    d = IntraGrads(
        scores=dscores.view(f.intra.scores.shape),
        from_state=(seen @ f.met.mT).view_as(f.rows.reads),
        to_state=(kept @ after.mT).view_as(f.rows.writes),
        log_total=_log_total(f, after),
    )
    return d, dv.addcmul_(dkept, gate.to_end), dgv


def _by_term(
    terms: Terms,
    f: Forward,
    inputs: InputGrads,
    dv: Tensor,
    dgv: Tensor | None,
) -> dict[str, Tensor]:
    grads = {"q": inputs.reads[:, :, 0], "k": inputs.writes[:, :, 0], "v": dv}
    if f.rows.beta is not None:
        beta, dread = f.rows.beta[..., None], inputs.reads[:, :, 1]  # of -beta p
        p = f.rows.writes[:, :, 0] if terms.p is None else f.span.split(terms.p)
        grads["beta"] = (dv * f.rows.v).sum(-1) - (dread * p).sum(-1)
        grads["v"] = dv * beta
        if terms.p is None:
            grads["k"] = grads["k"].addcmul(dread, beta, value=-1)
        else:
            grads["p"] = dread * -beta
    if terms.a is not None:
        grads["a"], grads["b"] = inputs.reads[:, :, 1], inputs.writes[:, :, 1]
    if terms.g is not None and inputs.g is not None:
        # a scalar gate that had to be spread over the channels is summed again
        grads["g"] = inputs.g.sum(-1) if terms.g.dim() == inputs.g.dim() else inputs.g
    if dgv is not None:
        grads["gv"] = dgv
    return grads


def _add_bonus(terms: Terms, f: Forward, do: Tensor, grads: dict[str, Tensor]) -> None:
    """o_i has the term (q_i . (u k_i)) v_i."""
    assert terms.u is not None
    q, k, v, u = f.rows.reads[:, :, 0], f.rows.writes[:, :, 0], f.rows.v, f.span.by_head(terms.u)
    c = (q * k * u).sum(-1, keepdim=True)
    dc = (do * v).sum(-1, keepdim=True)
    grads["v"] = grads["v"].addcmul(c, do)
    grads["q"] = grads["q"].addcmul(dc, u * k)
    grads["k"] = grads["k"].addcmul(dc, u * q)
    heads = f.span.layout.heads
    grads["u"] = (dc * q * k).view(-1, heads, f.span.chunk, q.shape[-1]).sum((0, 2))
