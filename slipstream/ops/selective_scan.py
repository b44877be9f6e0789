"""Selective scan: the recurrence of Mamba."""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.selective_scan import inputs, op
from slipstream.runtime.context_parallel import ContextParallel


@checks.operator
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Selective state space model: a state of N numbers for every channel.

        dt_t = softplus(delta_t + delta_bias)
        h_t  = exp(dt_t A) h_{t-1} + dt_t B_t u_t
        y_t  = (sum_n C_t h_t + D u_t) silu(z_t)

    Args:
        u: inputs [B, T, D], any floating dtype.
        delta: step sizes [B, T, D].
        A: [D, N], at most 0: decay rates.
        B, C: [B, T, N], or [B, T, G, N] with a B and C for each of G groups of channels.
        D: [D], of the input that y takes directly; None is 0.
        z: [B, T, D], output gates; None is no gate.
        delta_bias: [D], added to delta; None is 0.
        delta_softplus: take softplus of delta and its bias; if not, they have to be at least 0.
        initial_state: h before the first token [S, D, N], float32; zeros if None. S = B, or the
            number of packed sequences.
        output_final_state: return h after the last token too.
        cu_seqlens: offsets [S+1] of S sequences packed in B == 1, int32 or int64.
        context: a slipstream.parallel.ContextParallel, with this rank's tokens, the states of all
            sequences and no cu_seqlens.
        impl: "eager", "triton" or "reference" to insist on one; chosen if None.

    All are of any floating dtype; they need not be of one.

    Returns:
        y [B, T, D] in u's dtype, and the final state [S, D, N], float32 (float64 for float64), or
        None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: 9 B T D N flops and B T D N exponentials; u, delta, z read and y written once; for
    backward a state each 64 tokens is kept.
    Source: Gu, Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023),
    algorithm 2. mamba_ssm has channels before tokens: slipstream.compat.mamba_ssm.
    """
    B, C = (x[:, :, None] if x.dim() == 3 else x for x in (B, C))
    tensors = inputs.ScanInputs(u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens)
    return op.run(tensors, delta_softplus, output_final_state, impl, context)
