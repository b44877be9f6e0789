"""What the linear family computes, as data: the tensors of one recurrence.

    S_t = D_t S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T          D_t = diag(exp(g_t))
    o_t = scale * q_t^T S_t

Which terms are given says which instance it is; None means the term is absent.

    transition  none   beta and a absent
                delta  beta given: b_t = -beta_t k_t, writes beta_t k_t v_t^T. What it erases is
                       what the state holds under k_t after the decay, a_t = D_t k_t:
                       S_t = D_t S_{t-1} + k_t (beta_t (v_t - k_t^T D_t S_{t-1}))^T
                       or, with p given, under p_t before it, a_t = p_t:
                       S_t = D_t S_{t-1} + k_t (beta_t (v_t - p_t^T S_{t-1}))^T
                       or, with erase and write given in the place of beta, by gates of channels:
                       S_t = D_t S_{t-1} + k_t (write_t v_t - (erase_t k_t)^T D_t S_{t-1})^T
                dplr   a and b given, free
    decay       none   g absent
                scalar g [B, T, HV]
                channel g [B, T, HV, K]
    value decay gv [B, T, HV, V] multiplies the columns of S as exp(g) multiplies its rows
    read        after the write; with u given before it, plus the current token with bonus u:
                o_t = scale * (q_t^T S_{t-1} + (q_t . (u k_t)) v_t)

Shapes: B batch, T tokens, H heads of q, k, p, a, b; HV heads of the rest, a multiple of H, head hv
reading head hv // (HV // H); K key width, V value width; N sequences (B, or those packed in B = 1).
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

# Channels of a head, at most, that kernels take (wide_heads.py).
MAX_HEAD_DIM = 256


class LinearInputs(NamedTuple):
    """q, k, p, a, b [B, T, H, K]; v, write [B, T, HV, V]; erase [B, T, HV, K]; u [HV, K];
    initial_state [N, HV, K, V].

    g, gv and beta as above; beta may also be [B, T, HV, V], per column, on the recurrent path.
    cu_seqlens [N+1] packs N sequences in B = 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    gv: Tensor | None = None
    beta: Tensor | None = None
    p: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    u: Tensor | None = None
    erase: Tensor | None = None
    write: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def transition(self) -> str:
        if self.a is not None:
            return "dplr"
        return "none" if self.beta is None and self.erase is None else "delta"

    @property
    def decay(self) -> str:
        if self.g is None:
            return "none"
        return "scalar" if self.g.dim() == 3 else "channel"

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic and of the state: float64 stays, everything else is float32."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def max_head_dim(self) -> int:
        return max(self.q.shape[-1], self.v.shape[-1])

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return (self.sequences, self.v.shape[2], self.q.shape[3], self.v.shape[3])


class ForwardCall(NamedTuple):
    """Arguments of slipstream::linear_forward and linear_spans, behind the terms.

    Attributes:
        chunk: tokens of a chunk, 0 for token by token, op.CONSISTENT for consistent=True.
        impl: an implementation, or several to try in order, "triton|eager".
        wide: o in float32.
        num_slices: where a backward follows, how many slices the tokens go in.
    """

    scale: float
    chunk: int
    impl: str
    wide: bool = False
    num_slices: int | None = None


class BackwardCall(NamedTuple):
    """Arguments of slipstream::linear_backward, behind the terms.

    Attributes:
        scale, chunk, impl: of ForwardCall.
        gate_gradient: whether anybody wants that of g.
        checkpoints: the states between slices, which forward left.
    """

    dout: Tensor | None
    dfinal: Tensor | None
    scale: float
    chunk: int
    impl: str
    gate_gradient: bool = True
    checkpoints: Tensor | None = None


NUM_TERMS = len(LinearInputs._fields)
# In the order of LinearInputs: those that have a gradient.
DIFFERENTIABLE = LinearInputs._fields[:-1]


def contiguous(terms: LinearInputs) -> LinearInputs:
    """q, k, v and the state as kernels index them; g has strides, which count in 32 bits."""
    state, g = terms.initial_state, terms.g
    if g is not None and sum((n - 1) * s for n, s in zip(g.shape, g.stride())) >= 2**31:
        g = g.contiguous()
    return terms._replace(
        q=terms.q.contiguous(),
        k=terms.k.contiguous(),
        v=terms.v.contiguous(),
        g=g,
        initial_state=None if state is None else state.contiguous(),
        cu_seqlens=None if terms.cu_seqlens is None else terms.cu_seqlens.contiguous(),
    )


def pointers(terms: LinearInputs, names: Iterable[str]) -> dict[str, Tensor | None]:
    """Arguments of a kernel: q_ptr and so on."""
    return {f"{name}_ptr": getattr(terms, name) for name in names}
