"""rotary_embedding, its tables, and the positions of packed sequences."""

import torch
from torch import Tensor

from slipstream.common import checks, varlen
from slipstream.kernels.elementwise import rotary as kernels
from slipstream.runtime import autograd, dispatch, token_ids, trees

_CANDIDATES = dispatch.triton_or_eager(kernels.unsupported_reason)


@checks.operator
def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
    impl: str | None = None,
) -> Tensor:
    """Turns pairs of features by an angle that grows with the position.

        y1 = x1 cos_p - x2 sin_p        y2 = x2 cos_p + x1 sin_p

    Args:
        x: [B, T, H, D], any floating dtype; 16-bit inputs are turned in float32.
        cos, sin: [S, R/2], a row for each position, R <= D even, D - R features stay; or
            [B or 1, T, R/2], a row for each token, without positions. No gradient reaches them.
        positions: int32 or int64 [T] or [1 or B, T], rows of cos and sin; None is 0, 1, ..., T - 1.
            One outside of the table is a ValueError on the CPU; on CUDA it takes the nearest row,
            and the next slipstream call or slipstream.synchronize() raises.
        interleaved: the pairs are (2i, 2i + 1), as GPT-J, not (i, i + R/2), as GPT-NeoX.
        impl: None chooses, under torch.compile a kernel of its own; "eager", "triton" or
            "reference" is used or refused.

    Returns:
        y in x's shape and dtype.

    Raises:
        ValueError: shapes do not fit, or a position is outside of the table. TypeError: dtypes.

    Cost: on CUDA one read and one write of x, elsewhere 3 reads or writes of its size.
    Source: Su et al., RoFormer, 2021, eq. 34.
    """
    checks.expect_rank("x", x, 4, "[B, T, H, D]")
    checks.expect_shape("sin", sin, cos.shape)
    checks.expect_floating({"x": x, "cos": cos, "sin": sin})
    checks.expect_one_device({"x": x, "cos": cos, "sin": sin, "positions": positions})
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"cos: want at most {x.shape[-1] // 2} columns, half of x's features, "
            f"got {cos.shape[-1]}"
        )
    positions = _check_rows(cos, x, positions)
    if impl is None and torch.compiler.is_compiling():
        impl = "eager"  # torch.compile makes one kernel of it and of what is around it
    call = (x, cos.shape[-1], interleaved)
    impl = dispatch.choose(_CANDIDATES, call, impl, "rotary_embedding", x).impls
    if dispatch.is_triton(impl):
        return kernels.rotary_by_table(x, cos, sin, positions, interleaved, impl)
    if positions is not None and not torch.compiler.is_compiling():
        token_ids.expect_ids("positions", positions, cos.shape[0])
        positions = token_ids.clamped(positions, cos.shape[0])
    cos, sin = (kernels.table_rows(table, x, positions) for table in (cos, sin))
    run = kernels.rotary_reference if impl == "reference" else kernels.rotary
    wide = checks.wide_dtype(x)
    cos, sin = checks.cast(cos, wide)[:, :, None], checks.cast(sin, wide)[:, :, None]
    return checks.cast(run(checks.cast(x, wide), cos, sin, interleaved), x.dtype)


def rotary_heads(
    qkv: Tensor, tables: tuple[Tensor, Tensor], sizes: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of qkv [B, T, H, D], sizes[i] heads of each, the first two turned as
    rotary_embedding does; tables: cos and sin [B or 1, T, R/2]."""
    cos, sin = tables
    if not autograd.by_operation() and autograd.needs_autograd(qkv):
        call = (qkv, cos.shape[-1], False)
        impl = dispatch.choose(_CANDIDATES, call, None, "rotary_embedding", qkv).impls
        if dispatch.is_triton(impl):
            return kernels.split_rotary(qkv, cos, sin, sizes, impl)
    qk, v = qkv.split([sizes[0] + sizes[1], sizes[2]], dim=2)
    q, k = rotary_embedding(qk, cos, sin).split(sizes[:2], dim=2)
    return q, k, v


@checks.operator
def rotary_tables(
    positions: Tensor,
    dim: int,
    *,
    base: float = 10000.0,
    xpos: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles p base^(-2i/R), with xpos times z_i^(p / xpos).

        z_i = (2i/R + 0.4) / 1.4

    Args:
        positions: integer or floating [...], p.
        dim: R, how many features turn; even.
        base: the slowest pair turns once in about 2 pi base tokens.
        xpos: None is plain rotary. Else scores of a query and a key decay with their distance, pair
            i by a factor z_i every |xpos| tokens: for example 512 for queries and -512 for keys.
        dtype: of the result; the angles are float32, float64 if this is.

    Returns:
        cos, sin, each [..., R/2].

    Raises:
        ValueError: dim is odd or negative, base is not above 0, or xpos is 0. TypeError: positions
            are no numbers, or dtype is not floating.
    Source: Su et al., RoFormer, 2021; Sun et al., A Length-Extrapolatable Transformer, 2022.
    """
    if positions.dtype == torch.bool or positions.is_complex():
        raise TypeError(f"positions: want an integer or floating dtype, got {positions.dtype}")
    if not dtype.is_floating_point:
        raise TypeError(f"dtype: want a floating dtype, got {dtype}")
    if dim < 0 or dim % 2:
        raise ValueError(f"dim: want an even number of features, got {dim}")
    if not base > 0:
        raise ValueError(f"base: want more than 0, got {base}")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    pair = torch.arange(0, dim, 2, device=positions.device, dtype=wide)
    place = positions.to(wide)[..., None]
    angle = place * base ** (-pair / max(dim, 1))
    if xpos is None:
        return angle.cos().to(dtype), angle.sin().to(dtype)
    if not abs(xpos) > 0:
        raise ValueError(f"xpos: want tokens, below 0 for keys, got {xpos}; None is without")
    size = ((pair / max(dim, 1) + 0.4) / 1.4) ** (place / xpos)
    return (angle.cos() * size).to(dtype), (angle.sin() * size).to(dtype)


@checks.operator
def packed_positions(
    cu_seqlens: Tensor,
    tokens: int,
    *,
    parents: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The position of each packed token in its own sequence.

    Args:
        cu_seqlens: int32 or int64 [N+1].
        tokens: T, all of them.
        parents: int32 or int64 [N], the earlier sequence at whose end each goes on, -1 for none: a
            row of prefix trees (PrefixTree).
        offsets: integer [N], the position of each sequence's first token; None is 0. With parents
            only those of roots count.

    Returns:
        int64 [1, T].

    Raises:
        ValueError or TypeError: cu_seqlens or offsets does not fit.

    Cost: T log N, without a host sync; parents on a device are read once.
    """
    checks.expect_cu_seqlens(cu_seqlens, 1, tokens)
    if not torch.compiler.is_compiling():
        token_ids.expect_offsets("cu_seqlens", cu_seqlens, tokens)
    token = torch.arange(tokens, device=cu_seqlens.device)
    begin = varlen.bounded_offsets(cu_seqlens, tokens)
    start = begin[:-1]
    if offsets is not None:
        checks.expect_shape("offsets", offsets, start.shape)
        checks.expect_one_device({"cu_seqlens": cu_seqlens, "offsets": offsets})
        checks.expect_index("offsets", offsets)
    if parents is not None:
        offsets = trees.eagerly(_first_positions, cu_seqlens, parents, offsets)
    if offsets is not None:
        start = start - offsets
    sequence = torch.searchsorted(begin[1:], token, right=True)
    return (token - start[sequence])[None]


def _first_positions(cu_seqlens: Tensor, parents: Tensor, offsets: Tensor | None) -> Tensor:
    """Of the nodes of trees [N]."""
    tree, device = trees.tree_of(cu_seqlens, parents), cu_seqlens.device
    starts = torch.tensor(tree.starts, device=device)
    return starts if offsets is None else starts + offsets[torch.tensor(tree.roots, device=device)]


def _check_rows(table: Tensor, x: Tensor, positions: Tensor | None) -> Tensor | None:
    """positions as [1 or B, T], if there are any."""
    batch, tokens = x.shape[:2]
    if table.dim() == 3:
        if positions is not None:
            raise ValueError("positions: want None beside cos and sin that have a row per token")
        rows = batch if table.shape[0] != 1 else 1
        checks.expect_shape("cos", table, (rows, tokens, table.shape[-1]))
        return None
    checks.expect_rank("cos", table, 2, "[S, R/2] or [B, T, R/2]")
    if positions is None:
        if table.shape[0] < tokens:
            raise ValueError(
                f"cos: want at least {tokens} rows, one per token, got {table.shape[0]}"
            )
        return None
    checks.expect_index("positions", positions)
    if positions.dim() == 1:
        checks.expect_shape("positions", positions, (tokens,))
        return positions[None]
    rows = 1 if positions.shape[:1] == (1,) else batch
    checks.expect_shape("positions", positions, (rows, tokens))
    return positions
