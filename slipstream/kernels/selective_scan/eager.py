"""The selective scan in plain torch, in segments of tokens, and the oracle of the tests.

The states of a segment are made at once, token by token, and again in backward: what is saved is a
state each CHUNK tokens. MATH.md has the gradients.

Cost: 9 B T D N flops forward; memory 3 CHUNK_ELEMENTS forward, 6 backward.

The oracle is the recurrence token by token:

    dt_t = softplus(delta_t + delta_bias)                        or delta_t + delta_bias
    h_t[d, n] = exp(dt_t[d] A[d, n]) h_{t-1}[d, n] + dt_t[d] B_t[n] u_t[d]
    y_t[d] = (sum_n C_t[n] h_t[d, n] + D[d] u_t[d]) silu(z_t[d])

in plain differentiable torch in float32, or float64 for float64 inputs. Cost: T steps of O(B D N).
Symbols: B batch, T tokens, D channels, N numbers a channel's state has, G groups of B and C.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common.checks import wide_dtype
from slipstream.common.linear_rows import CHUNK_ELEMENTS
from slipstream.common.varlen import by_sequence, check_cu_seqlens_values
from slipstream.kernels.selective_scan.inputs import CHUNK, ScanInputs, empty_states


def selective_scan_reference(inputs: ScanInputs, delta_softplus: bool) -> tuple[Tensor, Tensor]:
    """y [B, T, D] in u's dtype and the final state [S, D, N]."""
    names = ("u", "delta", "B", "C", "z", "initial_state")

    def run(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        return _run(inputs._replace(**dict(zip(names, tensors))), delta_softplus)

    tokens = [getattr(inputs, name) for name in names[:-1]]
    y, final = by_sequence(run, tokens, inputs.initial_state, inputs.cu_seqlens)
    return y.to(inputs.u.dtype), final


def _run(inputs: ScanInputs, delta_softplus: bool) -> tuple[Tensor, Tensor]:
    dtype = wide_dtype(inputs.u)
    u, delta, A = (x.to(dtype) for x in inputs[:3])
    each = u.shape[2] // inputs.B.shape[2]
    B, C = (x.to(dtype).repeat_interleave(each, 2) for x in (inputs.B, inputs.C))  # [B, T, D, N]
    if inputs.delta_bias is not None:
        delta = delta + inputs.delta_bias.to(dtype)
    if delta_softplus:
        delta = F.softplus(delta)
    state = inputs.initial_state
    h = u.new_zeros(u.shape[0], *A.shape) if state is None else state.to(dtype)
    outputs = []
    for t in range(u.shape[1]):
        dt = delta[:, t, :, None]
        h = (dt * A).exp() * h + dt * B[:, t] * u[:, t, :, None]
        outputs.append((h * C[:, t]).sum(-1))
    y = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(u)
    if inputs.D is not None:
        y = y + inputs.D.to(dtype) * u
    if inputs.z is not None:
        y = y * F.silu(inputs.z.to(dtype))
    return y, h


Gradients = list[Tensor | None]


class Rows(NamedTuple):
    """Sequences of one length, side by side: those of a batch, or one of those packed.

    inputs: their tokens, in the dtype of the arithmetic, with softplus taken of delta. tokens,
    sequences: where they are among all. begin [B]: their first tokens among all B T.
    """

    inputs: ScanInputs
    tokens: slice
    sequences: slice
    begin: Tensor

    def segments(self) -> Iterator[slice]:
        u, N = self.inputs.u, self.inputs.A.shape[1]
        max_elements = CHUNK_ELEMENTS["cpu" if u.is_cpu else "cuda"]
        step = CHUNK * max(1, max_elements // max(u.shape[0] * u.shape[2] * N * CHUNK, 1))
        for start in range(0, u.shape[1], step):
            yield slice(start, min(start + step, u.shape[1]))

    def first_state(self) -> Tensor:
        u, state = self.inputs.u, self.inputs.initial_state
        return u.new_zeros(u.shape[0], *self.inputs.A.shape) if state is None else state

    def state_before(self, segment: slice, states: Tensor) -> Tensor:
        """[B, D, N], out of the saved ones."""
        if segment.start == 0:
            return self.first_state()
        return states[self.places(segment.start // CHUNK)[:, 0]].mT

    def save(self, h: Tensor, segment: slice, states: Tensor) -> None:
        """Keeps the states before those chunks that follow on one that ends in the segment."""
        T = self.inputs.u.shape[1]
        first, last = segment.start // CHUNK + 1, min(segment.stop, T - 1) // CHUNK
        last_tokens = slice(first * CHUNK - 1 - segment.start, last * CHUNK - segment.start, CHUNK)
        states[self.places(first, last)] = h[:, last_tokens].mT

    def places(self, first: int, last: int | None = None) -> Tensor:
        """The places of the states before these chunks, [B, chunks], as inputs.empty_states
        says."""
        chunks = torch.arange(
            first, (first if last is None else last) + 1, device=self.begin.device
        )
        return (self.begin // CHUNK)[:, None] + chunks - 1


def selective_scan_forward(
    inputs: ScanInputs, delta_softplus: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, T, D] in u's dtype, the final state [S, D, N], and the states that backward reads."""
    states = empty_states(inputs).zero_()
    y = torch.empty(inputs.u.shape, dtype=inputs.u.dtype, device=inputs.u.device)
    final = states.new_zeros(inputs.sequences, *inputs.A.shape)
    if inputs.initial_state is not None:
        final.copy_(inputs.initial_state)
    for rows in _rows(inputs, delta_softplus):
        state = rows.first_state()
        for segment in rows.segments():
            terms = _Terms(rows.inputs, segment)
            h = terms.states(state)
            rows.save(h, segment, states)
            state = h[:, -1]
            out = terms.output(h)
            if terms.z is not None:
                out = out * F.silu(terms.z)
            y[:, rows.tokens][:, segment] = out
        final[rows.sequences] = state
    return y, final, states


def selective_scan_backward(
    inputs: ScanInputs,
    states: Tensor,
    dy: Tensor | None,
    dfinal: Tensor | None,
    delta_softplus: bool,
) -> Gradients:
    """Gradients of the nine tensors of ScanInputs that have one, None for those not given."""
    dtype = wide_dtype(inputs.u)
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")
    tensors = {name: getattr(inputs, name) for name in names}
    grads = {n: None if x is None else torch.zeros_like(x, dtype=dtype) for n, x in tensors.items()}
    if grads["initial_state"] is not None and dfinal is not None:
        grads["initial_state"].copy_(dfinal)
    for rows in _rows(inputs, delta_softplus):
        grad_state = None if dfinal is None else dfinal[rows.sequences].to(dtype)
        if grad_state is None:
            grad_state = torch.zeros_like(rows.first_state())
        for segment in reversed(list(rows.segments())):
            terms = _Terms(rows.inputs, segment)
            dout = None if dy is None else dy[:, rows.tokens][:, segment].to(dtype)
            local_grads, grad_state = terms.gradients(
                rows.state_before(segment, states), dout, grad_state
            )
            for name, x in local_grads.items():
                target = grads[name]
                if target is not None and x is not None:
                    at = target[:, rows.tokens][:, segment] if x.dim() > 2 else target
                    at += x
        if grads["initial_state"] is not None:
            grads["initial_state"][rows.sequences] = grad_state
    ddelta = grads["delta"]
    assert ddelta is not None
    if delta_softplus:
        ddelta *= torch.sigmoid(_biased_delta(inputs))
    if grads["delta_bias"] is not None:
        grads["delta_bias"] = ddelta.sum((0, 1))
    return [x if x is None else x.to(tensors[name].dtype) for name, x in grads.items()]


def _biased_delta(inputs: ScanInputs) -> Tensor:
    dtype = wide_dtype(inputs.u)
    delta, bias = inputs.delta.to(dtype), inputs.delta_bias
    return delta if bias is None else delta + bias.to(dtype)


def _rows(inputs: ScanInputs, delta_softplus: bool) -> Iterator[Rows]:
    """Those that have a token: the final state of an empty sequence is its first."""
    dtype, (B, T, _) = wide_dtype(inputs.u), inputs.u.shape
    delta = _biased_delta(inputs)
    if delta_softplus:
        delta = F.softplus(delta)
    floating = zip(ScanInputs._fields[:-1], inputs)
    wide = inputs._replace(**{n: None if x is None else x.to(dtype) for n, x in floating})
    wide = wide._replace(delta=delta, cu_seqlens=None)
    if inputs.cu_seqlens is None:
        begin = torch.arange(B, device=delta.device) * T
        yield Rows(wide, slice(0, T), slice(0, B), begin)
        return
    check_cu_seqlens_values(inputs.cu_seqlens, T)
    for s, (begin, end) in enumerate(pairwise(inputs.cu_seqlens.tolist())):
        if begin == end:
            continue
        tokens, which = slice(begin, end), slice(s, s + 1)
        cut = {name: getattr(wide, name) for name in ("u", "delta", "B", "C", "z")}
        cut = {name: None if x is None else x[:, tokens] for name, x in cut.items()}
        state = None if wide.initial_state is None else wide.initial_state[which]
        place = torch.tensor([begin], device=delta.device)
        yield Rows(wide._replace(**cut, initial_state=state), tokens, which, place)


class _Terms:
    """dt A and dt u B of a segment of tokens, for every channel and number of its state."""

    def __init__(self, inputs: ScanInputs, segment: slice) -> None:
        self.u, self.delta = inputs.u[:, segment], inputs.delta[:, segment]
        self.z = None if inputs.z is None else inputs.z[:, segment]
        self.A, self.D, self.groups = inputs.A, inputs.D, inputs.B.shape[2]
        # [B, T, G, 1, N]
        self.B, self.C = (x[:, segment, :, None] for x in (inputs.B, inputs.C))
        self.x = self.delta * self.u
        self.decay = (self.delta[..., None] * self.A).exp_()

    def grouped(self, x: Tensor) -> Tensor:
        """[B, T, D, ...] as [B, T, G, D / G, ...]"""
        return x.unflatten(2, (self.groups, -1))

    def states(self, state: Tensor) -> Tensor:
        """After each token, [B, T, D, N]."""
        h = (self.grouped(self.x)[..., None] * self.B).flatten(2, 3)
        before = state
        for decay, now in zip(self.decay.unbind(1), h.unbind(1)):
            before = now.addcmul_(decay, before)
        return h

    def output(self, h: Tensor) -> Tensor:
        """Before the output gate."""
        # no matrix product, whose order of sums may depend on the batch
        y = (self.grouped(h) * self.C).sum(-1).flatten(2, 3)
        return y if self.D is None else y + self.D * self.u

    def gradients(
        self, state: Tensor, dout: Tensor | None, grad_state: Tensor
    ) -> tuple[dict[str, Tensor | None], Tensor]:
        """By name, that of delta still after its softplus; and of the state before the segment."""
        h = self.states(state)
        dz = dy = None
        if dout is not None:
            dy = dout
            if self.z is not None:
                gate = torch.sigmoid(self.z)
                dy = dout * self.z * gate
                dz = dout * self.output(h) * gate * (1 + self.z * (1 - gate))
        dh = torch.zeros_like(h)
        if dy is not None:
            dh = (self.grouped(dy)[..., None] * self.C).flatten(2, 3)
        dh[:, -1] += grad_state
        decays, dhs = self.decay.unbind(1), dh.unbind(1)
        for t in range(len(dhs) - 2, -1, -1):
            dhs[t].addcmul_(decays[t + 1], dhs[t + 1])
        # dh_t a_t is the gradient of h_{t-1}, and with h_{t-1} that of dt_t A
        dg = self.decay * dh
        dstate = dg[:, 0].clone()
        dg[:, 1:] *= h[:, :-1]
        dg[:, 0] *= state
        dx = (self.grouped(dh) * self.B).sum(-1).flatten(2, 3)
        local_grads: dict[str, Tensor | None] = {
            "u": self.delta * dx,
            "delta": self.u * dx + (dg * self.A).sum(-1),
            "A": (dg * self.delta[..., None]).sum((0, 1)),
            "B": (self.grouped(self.x)[..., None, :] @ self.grouped(dh)).squeeze(-2),
            "z": dz,
        }
        if dy is not None:
            local_grads["C"] = (self.grouped(dy)[..., None, :] @ self.grouped(h)).squeeze(-2)
            if self.D is not None:
                local_grads["u"] = self.delta * dx + self.D * dy
                local_grads["D"] = (dy * self.u).sum((0, 1))
        return local_grads, dstate
