"""Launch of the delta rule's gradients, chunk by chunk."""

from typing import Any

from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.triton.delta.dqkg import delta_dqkg_kernel
from slipstream.kernels.linear.triton.delta.plan import (
    launch_options,
    state_descriptor,
    tile_of,
    tma_descriptor,
)
from slipstream.runtime.launch_cache import cached


def launch_dqkg(
    terms: LinearInputs,
    do: Tensor,
    rows: Tensor,
    w: Tensor,
    dv: Tensor,
    states: Tensor,
    dstates: Tensor,
    scale: float,
    grads: dict[str, Tensor],
) -> None:
    """Into grads: those of q, k, p [B, T, HV, K], of beta and g [B, T, HV]."""
    (T, HV, V), (H, K) = terms.v.shape[1:], terms.q.shape[2:]
    tile, _ = tile_of(terms)
    BK = tile.grads.B
    BV = min(64, BK)
    made, tma = tma_descriptor(
        terms,
        [do, w, dv, grads["q"], grads["k"], grads.get("p")],
        [BV, BV, BV, BK, BK, BK],
    )
    given = [state_descriptor(s, BV, BK) if tma else s for s in (states, dstates)]
    launch: Any = cached(delta_dqkg_kernel)[(HV * states.shape[0],)]
    launch(
        terms.q,
        terms.k,
        terms.p,
        *made[:3],
        *given,
        *made[3:],
        rows,
        grads["beta"],
        grads.get("g"),
        terms.cu_seqlens,
        scale,
        T,
        terms.sequences,
        HV,
        H,
        K=K,
        V=V,
        BK=BK,
        BV=BV,
        C=tile.C,
        HAS_P=terms.p is not None,
        GROUPED=H != HV,
        TMA=tma,
        **launch_options(terms, tile.grads),
    )
