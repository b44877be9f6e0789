"""The inputs of the selective scan, the layout of its states between the passes, and what the
launches of both back ends share: arguments, and the sums of what a backward leaves.
"""

from typing import Any, NamedTuple

from torch import Tensor

from slipstream.common.checks import wide_dtype
from slipstream.runtime.backends import INTERPRETED

# Tokens from one saved state to the next; backward recomputes those in between.
CHUNK = 8 if INTERPRETED else 64
# The same of the kernels for sm_90.
SM90_CHUNK = 16


class ScanInputs(NamedTuple):
    """Tensors of one call.

    u, delta, z: [B, T, D]. A: [D, N]. B, C: [B, T, G, N]. D, delta_bias: [D]. initial_state:
    [S, D, N] for S sequences. cu_seqlens: [S + 1], or None for S = B.
    """

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    delta_bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def sequences(self) -> int:
        return self.u.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


def empty_states(inputs: ScanInputs, chunk: int = CHUNK, for_backward: bool = True) -> Tensor:
    """Room for the states before each chunk but a sequence's first, [chunks, N, D]; none unless a
    backward follows.

    Chunk i > 0 of the sequence whose first token is the t-th of all B T has place t // chunk + i -
    1: a sequence of T tokens needs (T - 1) // chunk places, so that none is shared, and the number
    of sequences does not count.
    """
    u = inputs.u
    # two more: a trace of unknown T would have to know whether there is one
    chunks = u.shape[0] * u.shape[1] // chunk + 2 if for_backward else 0
    return u.new_empty(chunks, inputs.A.shape[1], u.shape[2], dtype=wide_dtype(u))


# Programs that share the sequences of a backward: each leaves a sum over its own.
SEQUENCE_PROGRAMS = 64


def pointers(inputs: ScanInputs, B: Tensor, C: Tensor) -> dict[str, Any]:
    """The tensors, with B and C as a back end has them, A in float32, and all others without gaps;
    and how far it is from token to token of u, delta and z."""
    u, u_row = rows(inputs.u)
    delta, delta_row = rows(inputs.delta)
    z, z_row = (None, 0) if inputs.z is None else rows(inputs.z)
    A = inputs.A.float().T.contiguous()
    D, bias, state = map(contiguous, (inputs.D, inputs.delta_bias, inputs.initial_state))
    tensors = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "bias": bias}
    named: dict[str, Any] = {f"{name}_ptr": x for name, x in tensors.items()}
    return named | {"s_in_ptr": state, "u_row": u_row, "delta_row": delta_row, "z_row": z_row}


def rows(x: Tensor) -> tuple[Tensor, int]:
    """x [B, T, ...], and how far it is from each of the B T tokens to the next."""
    even = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    if x.stride(-1) != 1 or not even:
        x = x.contiguous()
    return x, x.stride(1)


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def channel_blocks(inputs: ScanInputs, width: int) -> int:
    """Counts the blocks of `width` channels, each within one group."""
    groups = inputs.B.shape[2]
    return groups * -(-inputs.u.shape[2] // groups // width)


class Gradients(NamedTuple):
    """What a backward kernel writes: of u, delta, z and the initial state the gradients; of A, D
    and the bias sums over a program's sequences [programs, ...]; of B and C sums over a block's
    channels, [blocks, B T, N] or, tokens last, [blocks, N, B T]."""

    du: Tensor
    ddelta: Tensor
    dA: Tensor
    dB: Tensor
    dC: Tensor
    dD: Tensor | None
    dz: Tensor | None
    dbias: Tensor | None
    ds_in: Tensor | None

    def pointers(self) -> dict[str, Tensor | None]:
        return {f"{name}_ptr": x for name, x in self._asdict().items()}

    def summed(self, inputs: ScanInputs, tokens_last: bool) -> list[Tensor | None]:
        """Gradients of the nine tensors of ScanInputs that have one, None for those not given."""
        of_groups = []
        for x, like in ((self.dB, inputs.B), (self.dC, inputs.C)):
            x = x.view(like.shape[2], -1, *x.shape[1:]).sum(1)
            x = x.mT if tokens_last else x
            x = x.movedim(0, 1).reshape(like.shape)
            # in order, as the operator's fake says
            of_groups.append(like.new_empty(like.shape).copy_(x))
        dD, dbias = (
            None if x is None or like is None else x.sum(0).to(like.dtype)
            for x, like in ((self.dD, inputs.D), (self.dbias, inputs.delta_bias))
        )
        dA = self.dA.sum(0).T.contiguous().to(inputs.A.dtype)
        return [self.du, self.ddelta, dA, *of_groups, dD, self.dz, dbias, self.ds_in]


def empty_gradients(
    inputs: ScanInputs, states: Tensor, programs: int, blocks: int, tokens_last: bool
) -> Gradients:
    (B, T, D), N = inputs.u.shape, inputs.A.shape[1]
    size = (N, B * T) if tokens_last else (B * T, N)
    dB, dC = states.new_empty(2, blocks, *size)
    dD, dbias = (
        None if x is None else states.new_empty(programs, D) for x in (inputs.D, inputs.delta_bias)
    )
    du, ddelta = (x.new_empty(x.shape) for x in (inputs.u, inputs.delta))
    dz, ds_in = (
        None if x is None else x.new_empty(x.shape) for x in (inputs.z, inputs.initial_state)
    )
    return Gradients(du, ddelta, states.new_zeros(programs, N, D), dB, dC, dD, dz, dbias, ds_in)
