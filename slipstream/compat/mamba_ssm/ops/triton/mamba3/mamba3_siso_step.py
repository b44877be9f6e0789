"""mamba_ssm.ops.triton.mamba3.mamba3_siso_step: one token of Mamba-3 SISO."""

from typing import Any

from torch import Tensor

from slipstream.common import checks
from slipstream.compat.mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import siso
from slipstream.ops.mamba3 import fused_recurrent_mamba3


@checks.operator
def mamba3_siso_step(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    Angles: Tensor,
    D: Tensor | None = None,
    Z: Tensor | None = None,
    Input_States: Any = None,
) -> tuple[Tensor, list[Tensor]]:
    """One token, by slipstream.ops.fused_recurrent_mamba3.

    Args:
        Q, K: [B, G, N]. V, Z: [B, H, P]. ADT, DT, Trap: [B, H]. Angles: [B, H, A]. Q_bias, K_bias,
            D, Input_States: as mamba3_siso_combined has them, which says more; None is the start.

    Returns:
        y [B, H, P] and the new states, [angles, states, keys, values].

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
    """
    checks.expect_layouts(
        Q=(Q, "B G N"), K=(K, "B G N"), V=(V, "B H P"), ADT=(ADT, "B H"), DT=(DT, "B H"),
        Trap=(Trap, "B H"), Angles=(Angles, "B H A"), Z=(Z, "B H P"),
    )  # fmt: skip
    y, *states = siso(
        Q[:, None], K[:, None], V[:, None], ADT[..., None], DT[..., None], Trap[..., None],
        Q_bias, K_bias, Angles[:, None], D, None if Z is None else Z[:, None], Input_States,
        return_final_states=True, rule=fused_recurrent_mamba3,
    )  # fmt: skip
    return y[:, 0], states
