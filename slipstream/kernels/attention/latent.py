"""Attention to a cache of latents, each a key and a value of all heads: MLA's decoding, absorbed.

    x_ts = scale q_t . [c_s, r_s]     o_t = sum_s softmax(x_t)_s c_s     s <= lengths - T + t

slipstream::_softmax_latent has no gradient; where one is wanted, plain torch makes it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slipstream.common.checks import plain_int, wide_dtype
from slipstream.kernels.attention import cache, plan, probe
from slipstream.kernels.attention.plan import MAX_ROPE_WIDTH, MAX_WIDTH
from slipstream.kernels.attention.triton import tiles
from slipstream.runtime import backends, compile_ahead, custom_op, guarded_launch, token_ids
from slipstream.runtime.dispatch import Candidate, choose


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
    """o [B, T, H, width] in q's dtype.

    Args:
        q: [B, T, H, width + rest], the last query on its sequence's last key.
        latent: [B, S, width + rest], or pages [M, page, width + rest].
        lengths: [B], keys in use; None, or more than there are, is all.
        width: of c. scale: of the scores.
        table: [B, pages], the pages of each sequence; one outside of the cache is a page of zeros.
        impl: "triton", "eager", or None to choose.
    """
    grad = torch.is_grad_enabled() and (q.requires_grad or latent.requires_grad)
    impls = choose(CANDIDATES, (q, latent, width, scale, grad), impl, "latent attention", q).impls
    if grad:
        _check_pages(latent, lengths, table)
        return eager_latent_attention(q, latent, lengths, table, width, scale)[0]
    return _call(q, latent, lengths, table, width=width, scale=scale, impl=impls)[0]


def eager_latent_attention(
    q: Tensor,
    latent: Tensor,
    lengths: Tensor | None,
    table: Tensor | None,
    width: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o and lse [B, H, T], in plain torch, with gradients."""
    if table is not None:
        missing = cache.missing_pages(table, latent.shape[0])
        pages = latent[table.long().masked_fill(missing, 0)]
        latent = pages.masked_fill(missing[..., None, None], 0).flatten(1, 2)
    T, S = q.shape[1], latent.shape[1]
    x = (q.flatten(1, 2) @ latent.mT).unflatten(1, q.shape[1:3])  # [B, T, H, S]
    x = (x.double() if x.dtype == torch.float64 else x.float()) * scale
    c, key = latent[..., :width], torch.arange(S, device=q.device)
    if lengths is None:
        lengths = torch.full(q.shape[:1], S, device=q.device)
    else:  # what is not in use may be NaN
        c = c.masked_fill((key >= lengths[:, None])[..., None], 0)
    query_position = lengths.clamp(max=plain_int(S))[:, None] - T + torch.arange(T, device=q.device)
    x = x.masked_fill((key > query_position[..., None])[:, :, None], -torch.inf)
    lse = x.logsumexp(-1)
    p = (x - torch.where(lse.isfinite(), lse, 0.0)[..., None]).exp()
    o = p.to(latent.dtype).flatten(1, 2) @ c
    return o.unflatten(1, q.shape[1:3]), lse.transpose(1, 2).contiguous()


def unsupported_reason(call: tuple[Tensor, Tensor, int, float, bool]) -> str | None:
    """Why the Triton kernel can't take this call, or None if it can."""
    q, latent, width, scale, grad = call
    if grad:
        return "it has no gradient"
    if reason := backends.triton_unsupported(q, "q"):
        return reason
    if latent.dtype != q.dtype:
        return "q and the latents differ in dtype"
    if width > MAX_WIDTH or q.shape[-1] - width > MAX_ROPE_WIDTH:
        return f"latents may be at most {MAX_WIDTH} wide, and {MAX_ROPE_WIDTH} beside them"
    if scale <= 0:
        return "the scale is to be positive"
    if backends.INTERPRETED:
        return None
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, and q is {q.dtype}"
    of = tiles.family(torch.cuda.get_device_capability(q.device), hip=bool(torch.version.hip))
    if of not in tiles.LATENT:
        return f"there is no tile for {of}"
    return guarded_launch.known_failure(lambda: _kind(q, latent), q.device)


CANDIDATES = (
    Candidate("triton", "a kernel over shares of the cache", unsupported_reason),
    Candidate("eager", "plain torch, on any device"),
)


def _kind(q: Tensor, latent: Tensor) -> tuple:
    return plan.kind_of_cache("latent", q, latent, None)


def _latent(
    q: Tensor,
    latent: Tensor,
    lengths: Tensor | None,
    table: Tensor | None,
    width: int,
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    args = (q, latent, lengths, table, width, scale)
    _check_pages(latent, lengths, table)
    if impl != "eager" and 0 in (q.numel(), latent.numel()):
        o, lse = _fake(*args, impl)
        return o.zero_(), lse.fill_(-torch.inf)

    with guarded_launch.Guard(
        impl,
        q.device,
        lambda: _kind(q, latent),
        lambda: probe.mismatch_of_latents(args, _kernel, eager_latent_attention),
    ) as usable:
        if usable:
            return _kernel(*args)
    return eager_latent_attention(*args)


def _kernel(*args: Any) -> tuple[Tensor, Tensor]:
    """Triton is imported only here, once it is wanted."""
    from slipstream.kernels.attention.triton import decode_latent

    return decode_latent.decode(*args)


def _check_pages(latent: Tensor, lengths: Tensor | None, table: Tensor | None) -> None:
    pages, size = latent.shape[:2]
    token_ids.expect_below("table", table, pages, "pages of latent", lengths=lengths, step=size)


def _fake(q: Tensor, latent: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    lse_dtype = wide_dtype(q)
    return q.new_empty(B, T, H, args[2]), q.new_empty(B, H, T, dtype=lse_dtype)


def _at_sizes(args: tuple) -> Iterator[tuple]:
    """A token on other numbers of keys, in rows or in pages: of more, fewer programs share them."""
    q, latent, lengths, table, *options = args
    for keys in compile_ahead.KEYS:
        rows = compile_ahead.resized(latent, 1, keys) if table is None else latent
        pages = None if table is None else table.new_empty(1, -(-keys // latent.shape[1]))
        yield (
            compile_ahead.resized(q, 1, 1),
            rows,
            compile_ahead.resized(lengths, 1),
            pages,
            *options,
        )


_call = custom_op.KernelOp(
    "softmax_latent",
    "(Tensor q, Tensor latent, Tensor? lengths, Tensor? table, int width, float scale, str impl)"
    " -> (Tensor, Tensor)",
    _latent,
    _fake,
    at_sizes=_at_sizes,
)
_call.set_gradient(lambda *args: eager_latent_attention(*args[:-1]))
