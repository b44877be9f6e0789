"""HGRN: a gated recurrence of every channel on its own."""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.gated_scan.op import run
from slipstream.runtime.context_parallel import ContextParallel


@checks.operator
def chunk_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated scan over time: the recurrence of HGRN, elementwise.

        h_t = exp(g_t) h_{t-1} + x_t

    Args:
        x: inputs [B, T, D], any floating dtype; HGRN's are (1 - exp(g)) silu(i).
        g: log decays [B, T, D], at most 0, any floating dtype.
        initial_state: h before the first token [N, D], float32; zeros if None.
        output_final_state: return h after the last token too.
        reverse: run time backwards; the final state is then that before the first token.
        cu_seqlens: offsets [N+1] of N sequences packed in B == 1, int32 or int64.
        context: a slipstream.parallel.ContextParallel, with this rank's tokens, the states of all
            sequences and no cu_seqlens. None: one rank has all tokens.
        impl: "eager", "triton" or "reference" to insist on one; chosen if None.

    Returns:
        h [B, T, D] in x's dtype, and the final state [N, D], float32 (float64 for float64), or
        None.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: 4 B T D flops, x and g read and h written once; state D floats.
    Source: Qin, Yang, Zhong, "Hierarchically Gated Recurrent Neural Network for Sequence
    Modeling" (2023).
    """
    return run(x, g, initial_state, output_final_state, reverse, cu_seqlens, impl, context)


@checks.operator
def fused_recurrent_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes chunk_hgrn: both names are in use."""
    return run(x, g, initial_state, output_final_state, reverse, cu_seqlens, impl, context)
