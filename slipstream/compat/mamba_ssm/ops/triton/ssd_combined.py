"""mamba_ssm.ops.triton.ssd_combined: the scan of Mamba-2, and its layer in one function."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common import checks
from slipstream.compat.fixed import fixed, missing_names
from slipstream.integrations import linear_mixers, serving
from slipstream.ops import causal_conv1d, mamba, norm, simple_gla

__getattr__ = missing_names(__name__, ("selective_scan_bwd", "mamba_conv1d_scan_ref"))
NO_LIMIT = (0.0, float("inf"))


@checks.operator
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """Mamba-2: slipstream.ops.chunk_simple_gla with C, B and dt x as its q, k and v.

    Args:
        x, z: [B, T, H, P]. dt: [B, T, H]. A, dt_bias: [H]. B, C: [B, T, G, N]. D: [H] or [H, P].
        chunk_size: no effect: the kernels choose it.
        initial_states: [B, H, P, N].
        seq_idx: [B, T], which of the sequences packed in a row a token belongs to.
        cu_seqlens: offsets [S + 1] of sequences packed in B = 1 whose states are returned, read
            only if return_varlen_states. y and the last state follow seq_idx. Where that has other
            sequences there is a second scan.
        dt_limit: bounds of the step size.
        return_final_states: also return the states after a row, [B, H, P, N].
        return_varlen_states: also return those after each sequence of cu_seqlens, which begins with
            0: [S, H, P, N].
        state_dtype: no effect: states are float32.

    Returns:
        y [B, T, H, P], or a tuple of it and of the states asked for.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
    """
    checks.expect_layouts(
        x=(x, "B T H P"),
        dt=(dt, "B T H"),
        A=(A, "H"),
        B=(B, "B T G N"),
        C=(C, "B T G N"),
        D=(D, "H P" if D is not None and D.dim() == 2 else "H"),
        z=(z, "B T H P"),
        dt_bias=(dt_bias, "H"),
        initial_states=(initial_states, "S H P N"),
        seq_idx=(seq_idx, "B T"),
    )
    scan = partial(
        linear_mixers.mamba_chunk_scan_combined, x, dt, A, B, C, chunk_size, D, dt_bias,
        initial_states, dt_softplus, dt_limit, return_final_states, z, seq_idx=seq_idx,
    )  # fmt: skip
    if not return_varlen_states:
        return scan()
    if cu_seqlens is None:
        raise ValueError("cu_seqlens: want offsets with return_varlen_states, got None")
    if initial_states is not None:
        raise NotImplementedError(
            "initial_states: want None beside return_varlen_states, which starts each sequence at 0"
        )
    y, states = serving.mamba2(
        simple_gla.chunk_simple_gla, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit,
        cu_seqlens=cu_seqlens, output_final_state=True,
    )  # fmt: skip
    assert states is not None
    if not _are_sequences(seq_idx, cu_seqlens, x.shape[1]):
        return (*_tuple_of(scan()), states)
    # that of the last token's sequence: empty ones may be behind it
    last = states[torch.searchsorted(cu_seqlens, cu_seqlens.new_full((1,), x.shape[1])) - 1]
    return (y, last, states) if return_final_states else (y, states)


def _are_sequences(seq_idx: Tensor | None, cu_seqlens: Tensor, tokens: int) -> bool:
    """Whether the offsets are those of seq_idx [1, tokens]; False where values cannot be read."""
    if linear_mixers.is_unreadable(cu_seqlens):
        return False
    cuts = [0, tokens] if seq_idx is None else linear_mixers.offsets_of(seq_idx).tolist()
    return cuts == cu_seqlens.unique_consecutive().tolist()


mamba_chunk_scan = fixed(
    mamba_chunk_scan_combined,
    "mamba_chunk_scan",
    "mamba_chunk_scan_combined without states.",
    order="x dt A B C chunk_size D z dt_bias dt_softplus",
)


@checks.operator
def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """A layer of Mamba-2 after its first projection: convolution, scan, norm, last projection.

    Args:
        zxbcdt: [B, T, 2 M + 2 H P + 2 G N + H]: M gates and inputs of a gated MLP beside it, M
            often 0, gates z, the inputs of the scan, B, C and dt.
        conv1d_weight: [H P + 2 G N, W]. dt_bias, A: [H]. D: [H] with headdim, or [H, P].
        initial_states: [B, H, P, N]. seq_idx: [B, T], as mamba_chunk_scan_combined.
        rmsnorm_weight: [H P], of a norm of each group; without it the gate is the scan's.
        outproj_weight: [O, M + H P].
        chunk_size, state_dtype: no effect.

    Returns:
        [B, T, O], or [B, T, M + H P] without outproj_weight; or that and the states [B, H, P, N].

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.
    """
    if D.dim() == 1 and headdim is None:
        raise ValueError("headdim: want it with D [H], got None")
    if D.dim() == 1 and headdim is not None and headdim < 1:
        raise ValueError(f"headdim: want 1 or more, got {headdim}")
    if ngroups < 1:
        raise ValueError(f"ngroups: want 1 or more, got {ngroups}")
    checks.expect_layouts(
        zxbcdt=(zxbcdt, "B T F"),
        D=(D, "H P" if D.dim() == 2 else "H"),
        conv1d_weight=(conv1d_weight, "C W"),
        conv1d_bias=(conv1d_bias, "C"),
        dt_bias=(dt_bias, "H"),
        A=(A, "H"),
        initial_states=(initial_states, "S H P N"),
        seq_idx=(seq_idx, "B T"),
        rmsnorm_weight=(rmsnorm_weight, "I"),
        outproj_weight=(outproj_weight, "O J"),
        outproj_bias=(outproj_bias, "O"),
    )
    heads, width = D.shape if D.dim() == 2 else (D.shape[0], headdim or 0)
    dim = heads * width
    N = (conv1d_weight.shape[0] - dim) // ngroups // 2
    mlp = (zxbcdt.shape[-1] - 2 * dim - 2 * ngroups * N - heads) // 2
    if mlp < 0:
        raise ValueError(
            f"zxbcdt: want at least {2 * dim + 2 * ngroups * N + heads} features, "
            f"got {zxbcdt.shape[-1]}"
        )
    zx0, z, xBC, dt = zxbcdt.split([2 * mlp, dim, dim + 2 * ngroups * N, heads], -1)
    xBC = causal_conv1d.causal_conv1d_fn(
        xBC.mT, conv1d_weight, conv1d_bias, seq_idx, activation=activation
    ).mT
    x, B, C = xBC.split([dim, ngroups * N, ngroups * N], -1)
    y, *state = _tuple_of(
        mamba_chunk_scan_combined(
            x.unflatten(-1, (heads, width)),
            dt,
            A,
            B.unflatten(-1, (ngroups, N)),
            C.unflatten(-1, (ngroups, N)),
            chunk_size,
            D,
            z.unflatten(-1, (heads, width)) if rmsnorm_weight is None else None,
            dt_bias,
            initial_states,
            seq_idx,
            None,
            True,
            dt_limit,
            return_final_states,
        )
    )
    y = y.flatten(2)
    if rmsnorm_weight is not None:
        checks.expect_shape("rmsnorm_weight", rmsnorm_weight, (dim,))
        y = norm.rms_norm_gated(
            y,
            z,
            rmsnorm_weight,
            eps=rmsnorm_eps,
            norm_before_gate=norm_before_gate,
            group_size=dim // ngroups,
        )
    if mlp:
        gate, up = zx0.chunk(2, dim=-1)
        y = torch.cat([F.silu(gate) * up, y], -1)
    if outproj_weight is not None:
        checks.expect_shape(
            "outproj_weight", outproj_weight, (outproj_weight.shape[0], y.shape[-1])
        )
        bias = None if outproj_bias is None else outproj_bias.to(y.dtype)
        y = F.linear(y, outproj_weight.to(y.dtype), bias)
    return (y, *state) if return_final_states else y


def _tuple_of(x: Any) -> tuple:
    return x if isinstance(x, tuple) else (x,)


def ssd_selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
) -> Tensor:
    """mamba_chunk_scan_combined by the scan of Mamba-1, a step size and decay for each channel.

    Args:
        dt: [B, T, H] or [B, T, H, P]. A: [H] or [H P, N].
    """
    _, _, H, P = x.shape
    dt = dt.flatten(2) if dt.dim() == 4 else dt.repeat_interleave(P, 2)
    A = A.repeat_interleave(P)[:, None].expand(-1, B.shape[-1]) if A.dim() == 1 else A
    bias = None if dt_bias is None else dt_bias.repeat_interleave(P) if dt_bias.dim() == 1 else (
        dt_bias.flatten()
    )  # fmt: skip
    if dt_limit != NO_LIMIT:
        dt = dt if bias is None else dt + bias
        dt, bias = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit), None
    D = None if D is None else D.repeat_interleave(P) if D.dim() == 1 else D.flatten()
    z = None if z is None else z.flatten(2)
    softplus = dt_softplus and dt_limit == NO_LIMIT
    y, _ = mamba.selective_scan(x.flatten(2), dt, A, B, C, D, z, bias, softplus)
    return y.unflatten(2, (H, P))
