"""The inputs of the linear family, as data: the tensors of one recurrence.

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

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, cast, get_type_hints

import torch
from torch import Tensor

from slipstream.runtime.backends import device_of

# Channels of a head, at most, that kernels take (wide_heads.py).
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Term:
    """The properties of a term for code that treats all terms alike: the checks (dispatch.py),
    groups of rows and heads (modes/memory.py, wide_heads.py), and small problems of the same kind
    (probe.py).

    Attributes:
        dims: its dimensions, by the letters above.
        wide: those of its other form, which has more.
        wide_in_chunks: whether the chunked path takes that form, too.
        dtype: "q": that of q; "autocast": any, and that of q under autocast; "own": any.
        values: of a small problem, see probe.py.
    """

    dims: str
    wide: str = ""
    wide_in_chunks: bool = True
    dtype: Literal["q", "autocast", "own"] = "own"
    values: str = "unit"

    def dims_of(self, rank: int) -> tuple[str, ...]:
        """The letters of a tensor with `rank` dimensions."""
        wide = self.wide and rank == len(self.wide.split())
        return tuple((self.wide if wide else self.dims).split())

    @property
    def of_tokens(self) -> bool:
        """Whether it has a row for each token."""
        return self.dims.startswith("B T ")


class LinearInputs(NamedTuple):
    """The terms of a call, in the order of the operators' schemas; cu_seqlens [N+1] packs N
    sequences in B = 1. beta of columns is for the recurrent path alone."""

    q: Annotated[Tensor, Term("B T H K", dtype="q")]
    k: Annotated[Tensor, Term("B T H K", dtype="q")]
    v: Annotated[Tensor, Term("B T HV V", dtype="q", values="normal")]
    g: Annotated[Tensor | None, Term("B T HV", "B T HV K", values="log decay")] = None
    gv: Annotated[Tensor | None, Term("B T HV V", values="log decay")] = None
    beta: Annotated[
        Tensor | None, Term("B T HV", "B T HV V", wide_in_chunks=False, values="rate")
    ] = None
    p: Annotated[Tensor | None, Term("B T H K", dtype="q")] = None
    a: Annotated[Tensor | None, Term("B T H K", dtype="q")] = None
    b: Annotated[Tensor | None, Term("B T H K", dtype="q", values="erasing")] = None
    u: Annotated[Tensor | None, Term("HV K", values="normal")] = None
    erase: Annotated[Tensor | None, Term("B T HV K", dtype="autocast", values="rate")] = None
    write: Annotated[Tensor | None, Term("B T HV V", dtype="autocast", values="rate")] = None
    initial_state: Annotated[Tensor | None, Term("N HV K V", values="state")] = None
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
        """The dtype of the arithmetic and the state: float64 for float64, else float32."""
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

    @property
    def sizes(self) -> dict[str, int]:
        """By the letters of Term.dims."""
        B, T, H, K = self.q.shape
        HV, V = self.v.shape[2:]
        return {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V, "N": self.sequences}

    def of_tokens(self, change: Callable[[Tensor], Tensor]) -> "LinearInputs":
        """With `change` of each term that has a row for each token."""
        return self.with_tokens(lambda terms: [change(x) for x in terms])

    def with_tokens(self, change: Callable[[list[Tensor]], Sequence[Tensor]]) -> "LinearInputs":
        """With what `change` makes of all such terms together."""
        given = {name: x for name in TOKEN_TERMS if (x := getattr(self, name)) is not None}
        return self._replace(**dict(zip(given, change([*given.values()]), strict=True)))

    @property
    def dims(self) -> dict[str, tuple[str, ...]]:
        """Of each term that is given."""
        given = ((name, getattr(self, name), term) for name, term in TERMS.items())
        return {name: term.dims_of(x.dim()) for name, x, term in given if x is not None}

    @property
    def row_heads(self) -> int | None:
        """Value heads from one token to the next in memory: as many as there are, or more where
        the terms are views of some. None where they are not alike, or not in order, or share
        memory."""
        H, HV, found = self.q.shape[2], self.v.shape[2], None
        for x in (getattr(self, name) for name in TOKEN_TERMS):
            if x is not None:
                rows = _row_heads(x, H, HV)
                if rows is None or (found is not None and rows != found):
                    return None
                found = rows
        return found


def _row_heads(x: Tensor, H: int, HV: int) -> int | None:
    """LinearInputs.row_heads of one term."""
    (B, T, heads), width = x.shape[:3], x.shape[3] if x.dim() == 4 else 1
    dense = (width == 1 or x.stride(-1) == 1) and (heads == 1 or x.stride(2) == width)
    rows, rest = divmod(x.stride(1) * HV, width * heads)
    even = B == 1 or x.stride(0) == T * x.stride(1)
    whole = not rest and rows >= HV and rows % (HV // H) == 0
    return rows if T > 1 and dense and even and whole else None


class ForwardCall(NamedTuple):
    """Arguments of slipstream::_linear_forward, behind the terms.

    Attributes:
        chunk: tokens of a chunk, 0 for token by token, op.CONSISTENT for consistent=True.
        impl: an implementation, or several to try in order, "triton|eager".
        wide: o in float32.
    """

    scale: float
    chunk: int
    impl: str
    wide: bool = False

    @property
    def backward(self) -> tuple[float, int, str]:
        """Those that BackwardCall has too."""
        return self[:3]


class BackwardCall(NamedTuple):
    """Arguments of slipstream::_linear_backward, behind the terms.

    Attributes:
        scale, chunk, impl: of ForwardCall.
        gate_gradient: whether anybody wants that of g.
    """

    dout: Tensor | None
    dfinal: Tensor | None
    scale: float
    chunk: int
    impl: str
    gate_gradient: bool = True


NUM_TERMS = len(LinearInputs._fields)
# By name, in the order of LinearInputs: all but cu_seqlens, and each of these has a gradient.
TERMS: dict[str, Term] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(LinearInputs, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
DIFFERENTIABLE = tuple(TERMS)
TOKEN_TERMS = tuple(name for name, term in TERMS.items() if term.of_tokens)


def not_taken(terms: LinearInputs, taken: Collection[str]) -> str | None:
    """Why kernels that take these terms alone do not take a call."""
    for name, x in terms._asdict().items():
        if x is not None and name not in taken:
            return f"it takes no {name}"
    return None


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


def as_fp32(terms: LinearInputs) -> LinearInputs:
    """With every floating tensor in float32."""
    wide = (x if x is None or not x.is_floating_point() else x.float() for x in terms)
    return LinearInputs(*cast(Any, wide))


def pointers(terms: LinearInputs, names: Iterable[str]) -> dict[str, Tensor | None]:
    """Arguments of a kernel: q_ptr and so on."""
    return {f"{name}_ptr": getattr(terms, name) for name in names}


def sum_grouped_heads(x: Tensor, H: int) -> Tensor:
    """x [B, T, HV, K], a gradient for each value head, to [B, T, H, K], that of the heads of q and
    k which they share."""
    B, T, HV, K = x.shape
    return x if HV == H else x.view(B, T, H, HV // H, K).sum(3)


def cast_gate_grads(grads: dict[str, Tensor], given: LinearInputs) -> dict[str, Tensor]:
    """grads, with those of g and beta, which are made in float32, in the shape and dtype of what
    was given."""
    for name in ("g", "beta"):
        if name in grads:
            like = getattr(given, name)
            grads[name] = grads[name].view(like.shape).to(like.dtype)
    return grads


def scale_or_default(scale: float | None, q: Tensor) -> float:
    """The factor on the output: K^-0.5 if none is given."""
    return float(max(q.shape[-1], 1) ** -0.5 if scale is None else scale)


def unscaled(dfinal: Tensor | None, scale: float, exchange: Any) -> Tensor | None:
    """dfinal for kernels whose gradients of states lack the scale. State passing multiplies and
    divides by it, with fixed segments once for each sequence, and not where a rank ends. So dfinal
    is divided before, in place, and what leaves the rank is multiplied after (scaled)."""
    if dfinal is None or exchange is None or exchange.segment_tokens is None:
        return dfinal
    return dfinal.mul_(1 / scale)


def scaled(dstate: Tensor, scale: float, exchange: Any) -> Tensor:
    """The gradient of the state as it leaves the rank, see unscaled."""
    if exchange is None or exchange.segment_tokens is None:
        return dstate
    return dstate.mul_(scale)


class Cotangents(NamedTuple):
    """The gradients of the results, and what else a backward has besides its terms; dstate is
    memory for the initial state's gradient, if there is one."""

    do: Tensor
    dfinal: Tensor | None
    dstate: Tensor | None
    scale: float
    gate_gradient: bool
    saved: Any
    exchange: Any


class ChunkBackend(ABC):
    """A back end of chunks: layouts of terms and gradients around a family's stages.

    Their order is in scalar_decay.py, vector_decay.py, delta.py and dplr.py, whose subclasses in
    triton/ and sm90/ launch them. An exchange is one of backend.py.
    """

    # Whether forward has something for `saved`.
    saves = False
    # Whether the kernels leave the scale out of gradients of states.
    scales_states = False

    @abstractmethod
    def forward(
        self,
        terms: LinearInputs,
        scale: float,
        dtype: torch.dtype | None = None,
        save: bool = False,
        exchange: Any = None,
        prefix: Any = None,
    ) -> tuple[Any, ...]:
        """o [B, T, HV, V] in dtype, q's if None, the final state [N, HV, K, V] in float32, and with
        `save` what backward takes as `saved`, if anything.

        Args:
            dtype: float32 or None.
            save: whether a backward follows.
            exchange: of a call whose sequences go on at other ranks.
            prefix: states to leave on the way.
        """

    @abstractmethod
    def gradients(self, terms: LinearInputs, given: Cotangents) -> dict[str, Tensor]:
        """All but the initial state's, which goes into dstate; beta's and g's may be float32."""

    @abstractmethod
    def chunk(self, terms: LinearInputs) -> int:
        """Its tokens."""

    def can_pass_states(self, terms: LinearInputs) -> bool:
        """Whether any segments can be combined."""
        return True

    def unit(self, terms: LinearInputs) -> int | None:
        """Tokens of which a segment is a multiple; None for those of a chunk."""
        return None

    def to_kernel_layout(self, terms: LinearInputs) -> LinearInputs:
        """Everything as the kernels index it."""
        return contiguous(terms)

    def contiguous(self, x: Tensor) -> Tensor:
        """As the kernels read it."""
        return x.contiguous()

    def to_input_layout(self, grads: dict[str, Tensor], given: LinearInputs) -> dict[str, Tensor]:
        """Gradients in the shapes and dtypes of what was given."""
        return cast_gate_grads(grads, given)

    def agree(self, terms: LinearInputs, chosen: Any, exchange: Any) -> Any:
        """The segments of a call whose sequences go on at other ranks."""
        given = self.chunk(terms), self.unit(terms), self.can_pass_states(terms)
        return exchange.segments(terms, chosen, *given)

    def backward(
        self,
        terms: LinearInputs,
        dout: Tensor | None,
        dfinal: Tensor | None,
        scale: float,
        gate_gradient: bool = True,
        saved: Any = None,
        exchange: Any = None,
    ) -> dict[str, Tensor]:
        """Gradients by the name of the term, in its shape and dtype.

        Args:
            gate_gradient: False lets it leave out that of g.
            saved, exchange: of forward.
        """
        given, terms = terms, self.to_kernel_layout(terms)
        dfinal = None if dfinal is None else dfinal.contiguous()
        if self.scales_states:
            if scale == 0.0:  # o does not depend on q, k, v
                dout, scale = None, 1.0
            dfinal = unscaled(dfinal, scale, exchange)
        if dout is not None and dout.dtype != terms.v.dtype:
            dout = dout.to(terms.v.dtype)
        do = torch.zeros_like(terms.v) if dout is None else self.contiguous(dout)
        dstate = None
        if terms.initial_state is not None:
            dstate = terms.initial_state.new_empty(terms.state_shape)
        saved = saved if self.saves else None
        options = do, dfinal, dstate, scale, gate_gradient, saved, exchange
        with device_of(do.device):
            grads = self.gradients(terms, Cotangents(*options))
            if dstate is not None:
                if self.scales_states:
                    dstate = scaled(dstate, scale, exchange)
                grads["initial_state"] = dstate
        return self.to_input_layout(grads, given)
