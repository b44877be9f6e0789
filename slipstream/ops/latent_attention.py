"""latent_attention: decoding by a cache of latents that stand for the keys and values of all heads.

See slipstream/kernels/attention/latent.py.
"""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.attention import latent as kernels


@checks.operator
def latent_attention(
    q: Tensor,
    latent: Tensor,
    lengths: Tensor | None = None,
    *,
    width: int,
    scale: float,
    table: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attention to latents, as in multi-head latent attention with its projections absorbed into q.

        x_ts = scale q_t . [c_s, r_s]     o_t = sum_s softmax(x_t)_s c_s     s <= lengths - T + t

    Args:
        q: [B, T, H, R + P], fp16, bf16, fp32 or fp64; the last query is aligned with its sequence's
            last key.
        latent: [B, S, R + P] in q's dtype: c and then r; or pages [M, page, R + P].
        lengths: int32 or int64 [B], keys in use; None, or more than there are, is all, negative
            is none, and o is 0.
        width: R, of c.
        scale: of the scores.
        table: int32 or int64 [B, pages], the pages of each sequence. A negative one is read as a
            page of zeros, on a GPU also one past the cache; on the CPU that is a ValueError.
        impl: None chooses; "triton" or "eager" is used or refused.

    Returns:
        o [B, T, H, R] in q's dtype; 0 for a query that sees nothing.

    Raises:
        ValueError: shapes do not fit, or a page is past the cache. TypeError: dtypes.
        NotImplementedError: impl cannot do it.

    Cost: 2 B H T S (2 R + P) flops, the cache read once; gradients are plain torch's, B H T S
        numbers. Deterministic.
    Source: DeepSeek-AI, DeepSeek-V2, 2024.
    """
    checks.expect_rank("q", q, 4, "[B, T, H, R + P]")
    checks.expect_rank("latent", latent, 3, "[B, S, R + P] or [M, page, R + P]")
    batch, both = q.shape[0], q.shape[3]
    if not 1 <= width <= both:
        raise ValueError(f"width: want 1 to the {both} that q has, got {width}")
    rows = latent.shape[0] if table is not None else batch
    checks.expect_shape("latent", latent, (rows, latent.shape[1], both))
    checks.expect_one_dtype({"q": q, "latent": latent})
    checks.expect_one_device({"q": q, "latent": latent, "lengths": lengths, "table": table})
    for name, x in {"lengths": lengths, "table": table}.items():
        checks.expect_index(name, x)
    if lengths is not None:
        checks.expect_shape("lengths", lengths, (batch,))
    if table is not None:
        checks.expect_rank("table", table, 2, "[B, pages]")
        checks.expect_shape("table", table, (batch, table.shape[1]))
    # as kernels read them
    lengths, table = (None if x is None else x.contiguous() for x in (lengths, table))
    return kernels.latent_attention(
        q, latent, lengths, width=width, scale=scale, table=table, impl=impl
    )
