"""attention: softmax attention in the layout [B, T, H, D]."""

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from slipstream.common import checks
from slipstream.common.checks import autocast_dtype
from slipstream.kernels.attention.context import key_copies, softmax_by_heads
from slipstream.kernels.attention.dispatch import plan_of_rotated, run
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.rotary import softmax_of_rotated
from slipstream.kernels.pointwise.rotary import unsupported_reason as rotary_unsupported
from slipstream.ops.rotary import rotary_heads
from slipstream.runtime.autograd import by_operation, needs_autograd
from slipstream.runtime.context_exchange import tie
from slipstream.runtime.context_parallel import ContextParallel, copied
from slipstream.runtime.context_share import Share
from slipstream.runtime.launch_cache import of_thread
from slipstream.runtime.token_ids import expect_offsets


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window_size: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    g: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    key_lengths: Tensor | None = None,
    context: ContextParallel | None = None,
    dropout_p: float = 0.0,
    return_lse: Literal[False] = False,
    impl: str | None = None,
    consistent: bool = False,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window_size: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    g: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    key_lengths: Tensor | None = None,
    context: ContextParallel | None = None,
    dropout_p: float = 0.0,
    return_lse: Literal[True],
    impl: str | None = None,
    consistent: bool = False,
) -> tuple[Tensor, Tensor]: ...
@checks.operator
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window_size: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    g: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    key_lengths: Tensor | None = None,
    context: ContextParallel | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    impl: str | None = None,
    consistent: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention.

        x_ts = f(scale q_t . k_s) - slope |t - s| + g_{s+1} + ... + g_t      f(x) = c tanh(x / c)
        lse_t = log(exp(sink) + sum_s exp(x_ts))        over the keys s that t sees
        o_t = sum_s m_ts exp(x_ts - lse_t) v_s          each part only if given

    Queries are aligned with the end of the keys: with T queries and S keys, query t is at position
    S - T + t, and causal means that it sees keys up to there.

    Args:
        q: [B, T, H, D], any floating dtype.
        k: [B, S, HKV, D] in q's dtype, H a multiple of HKV: head h reads key head h // (H / HKV).
        v: [B, S, HKV, DV] in q's dtype.
        scale: None is D^-0.5.
        causal: no query sees a later key.
        window_size: W: a query sees the last W keys, its own position included, and without causal
            as many after it; nothing if W is 0. Or (left, right): how many keys before and after
            its own position, -1 for no bound.
        softcap: c > 0 bounds the scores; None or 0 is no bound.
        g: [B, S, H], the forgetting gate: log of the factor on all earlier tokens, <= 0; -inf
            forgets them (so do -1e4 and below). Needs causal.
        sinks: [H], a score beside those of the keys that takes its share of the sum.
        alibi_slopes: [H] or [B, H], >= 0, without gradient.
        cu_seqlens: int32 or int64 [N+1], offsets of N sequences packed in B = 1. k, v and g are
            packed alike (S = T), or by cu_seqlens_k, or are [N, S, ...].
        cu_seqlens_k: int32 or int64 [N+1], offsets of the keys packed in [1, S, ...].
        key_lengths: int32 or int64 [B], or [N] if packed: how many of a sequence's keys are used,
            the first ones; the last query is aligned with the last of them. None, or more than
            there are, is all, negative is none.
        context: a slipstream.parallel.ContextParallel, with this rank's tokens of q, k, v and g
            and no offsets or lengths: ranks exchange heads, or gather keys. Not with dropout,
            or with a window that reaches to later keys. None: one rank has all tokens.
        dropout_p: each weight is dropped with this probability, else divided by 1 - dropout_p: m is
            0 or 1 / (1 - dropout_p). Each call draws a seed from torch's generator of q's device;
            what is dropped follows from it and from where query, key and head stand, alike in
            "triton" and "eager" and in the backward. "sm90" and "reference" have no dropout.
        return_lse: return lse too.
        impl: None chooses; "sm90", "triton", "eager" or "reference" is used or refused.
        consistent: the same bits for a query however many others there are, one or a whole prompt,
            with or without gradients, and whatever else there is in the batch. Causal calls of at
            least as many keys as queries, without context or dropout. In plain torch slow.

    Returns:
        o [B, T, H, DV] in q's dtype; 0 for a query that sees nothing. With return_lse also lse
        [B, H, T], float32 or q's float64; -inf for a query that sees nothing, not even a sink.
        Gradients flow through both, to q, k, v, g and sinks.

    Raises:
        ValueError: shapes do not fit, a negative window, dropout_p is no probability, or cu_seqlens
            are no offsets.
        TypeError: dtypes. NotImplementedError: impl cannot do it.

    Cost: 2 B H T S (D + DV) flops, of which those that no query sees are skipped; memory linear
        in T. Deterministic, also backward.
    Source: Vaswani et al., Attention Is All You Need, 2017; Dao et al., FlashAttention, 2022; Press
        et al., ALiBi, 2021; Lin et al., Forgetting Transformer, 2025.
    """
    if isinstance(window_size, Tensor):
        left, right = window_size.tolist()
        window_size = (left, right)
    if context is not None:
        if consistent:
            raise NotImplementedError("consistent: is not implemented with a context")
        given = {"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k, "key_lengths": key_lengths}
        for name, x in given.items():
            if x is not None:
                raise ValueError(f"{name}: want None with a context, which has the offsets")
        return context.eagerly(
            _across_ranks,
            q, k, v, g, context, causal, window_size, dropout_p,
            scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
            return_lse=return_lse, impl=impl,
        )  # fmt: skip
    k_offsets = _keys_of(cu_seqlens, cu_seqlens_k, key_lengths, k)
    _check(q, k, v, cu_seqlens, k_offsets, key_lengths)
    nothing = type(window_size) is int and window_size == 0
    left, right = window_of(1 if nothing else window_size, causal)
    _check_biases(q, k, g, sinks, alibi_slopes, cu_seqlens, right)
    narrow = autocast_dtype(q)
    if narrow is not None:
        q, k, v = (x.to(narrow) for x in (q, k, v))
    else:
        checks.expect_one_dtype({"q": q, "k": k, "v": v})
    factor = scale_of(scale, q)
    check_softcap(softcap)
    if nothing:
        o, lse = _sees_nothing(q, k, v, g, sinks)
        return (o, lse) if return_lse else o
    seed = _seed(dropout_p, q)
    terms = AttentionInputs(
        q, k, v, g, sinks, alibi_slopes, cu_seqlens, k_offsets, key_lengths, seed
    )
    options = AttentionOptions(factor, left, right, float(softcap or 0.0), float(dropout_p))
    o, lse = run(terms, options, return_lse, impl, consistent)
    return o if lse is None else (o, lse)


def rotary_attention(
    qkv: Tensor,
    tables: tuple[Tensor, Tensor],
    sizes: tuple[int, int, int],
    window_size: int | None,
    cu_seqlens: Tensor | None,
    fresh: bool,
) -> Tensor:
    """Causal attention of q, k and v in qkv [B, T, H, D], sizes[i] heads of each, the first two
    turned as rotary_embedding does; tables: cos and sin [B or 1, T, R/2].

    fresh: qkv may be overwritten: nothing else reads it.
    """
    q, k, v = qkv.split(sizes, 2)
    left, right = window_of(window_size, True)
    terms = AttentionInputs(q, k, v, cu_q=cu_seqlens, cu_k=cu_seqlens)
    options = AttentionOptions(scale_of(None, q), left, right, 0.0, 0.0)
    impls = None
    trains = not by_operation() and autocast_dtype(qkv) in (None, qkv.dtype) and needs_autograd(qkv)
    if trains and rotary_unsupported(qkv, tables[0].shape[-1]) is None:
        impls = plan_of_rotated(terms, options)
    if impls is None:
        q, k, v = rotary_heads(qkv, tables, sizes)
        return attention(q, k, v, window_size=window_size, cu_seqlens=cu_seqlens)
    _check(q, k, v, cu_seqlens, cu_seqlens, None)
    # selective checkpointing may hand out qkv again
    plain = _get_current_dispatch_mode() is None or of_thread.warmup is not None
    return softmax_of_rotated(qkv, *tables, cu_seqlens, sizes, options, impls, fresh and plain)


def _across_ranks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    context: ContextParallel,
    causal: bool,
    window_size: int | tuple[int, int] | None,
    dropout_p: float,
    **options: Any,
) -> Any:
    """This rank's queries and the keys of all ranks up to what the last query sees."""
    if dropout_p:
        raise NotImplementedError(f"dropout_p: want 0 with a context, got {dropout_p}")
    right = window_of(None if window_size == 0 else window_size, causal)[1]
    if right > 0:
        raise NotImplementedError(f"window_size: want no later keys with a context, got {right}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.expect_rank(name, x, 4, "[B, T, H, D]")
        checks.expect_shape(name, x, (q.shape[0], q.shape[1], *x.shape[2:]))
    share = context.share(q.shape[1])
    whole_slopes = options["alibi_slopes"]
    if share.packed and whole_slopes is not None and whole_slopes.dim() == 2:
        checks.expect_shape("alibi_slopes", whole_slopes, (share.sequences, q.shape[2]))
        mine = [whole_slopes[n] for n in share.pieces]
        options["alibi_slopes"] = torch.stack(mine) if mine else whole_slopes[:0]
    if share.segment_tokens is None and not share.crossings.any:  # all sequences are whole
        return attention(
            q, k, v, g=g, causal=causal, window_size=window_size,
            cu_seqlens=context.offsets_on(q.device), **options,
        )  # fmt: skip
    copies = key_copies(q, k, share)
    if share.segment_tokens is not None and not copies:
        raise NotImplementedError(
            f"context: with segment_tokens ranks exchange heads; want heads of k that "
            f"{len(share.lengths)} ranks can share equally, got {k.shape[2]}"
        )
    if copies:
        if copies > 1:
            k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
        options["alibi_slopes"] = whole_slopes
        return _by_heads(q, k, v, g, context, share, causal, window_size, **options)
    begin, end = share.keys_of_pieces(to_the_end=right < 0)
    k, v, *gates = (share.gather_tokens(x) for x in ((k, v) if g is None else (k, v, g)))
    seen = [x[:, begin:end] for x in (k, v, *gates)]
    offsets = None
    if share.packed:
        last = [min(share.offsets[n + 1], end) - begin for n in share.pieces]
        offsets = copied(torch.tensor([0, *last], dtype=torch.int32, device="cpu"), q.device)
    found = attention(
        q, *seen[:2], g=seen[2] if gates else None, causal=causal, window_size=window_size,
        cu_seqlens=context.offsets_on(q.device), cu_seqlens_k=offsets, **options,
    )  # fmt: skip
    o, *lse = found if isinstance(found, tuple) else (found,)
    o = tie(o, k, v, *gates)
    return (o, *lse) if lse else o


def _by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    context: ContextParallel,
    share: Share,
    causal: bool,
    window_size: int | tuple[int, int] | None,
    *,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    return_lse: bool,
    impl: str | None,
) -> Any:
    """All tokens of some heads on each rank."""
    offsets = context.whole_offsets_on(q.device)
    nothing = type(window_size) is int and window_size == 0
    left, right = window_of(1 if nothing else window_size, causal)
    checks.expect_multiple("heads of q", q.shape[2], "heads of k", k.shape[2])
    checks.expect_floating({"q": q, "k": k, "v": v})
    checks.expect_one_device({"q": q, "k": k, "v": v})
    _check_biases(q, k, g, sinks, alibi_slopes, offsets, right)
    narrow = autocast_dtype(q)
    if narrow is not None:
        q, k, v = (x.to(narrow) for x in (q, k, v))
    else:
        checks.expect_one_dtype({"q": q, "k": k, "v": v})
    factor = scale_of(scale, q)
    check_softcap(softcap)
    if nothing:
        o, lse = _sees_nothing(q, k, v, g, sinks)
        return (o, lse) if return_lse else o
    inputs = AttentionInputs(q, k, v, g, sinks, alibi_slopes, offsets, offsets)
    given = AttentionOptions(factor, left, right, float(softcap or 0.0))
    o, lse = softmax_by_heads(inputs, given, impl, share, return_lse)
    return (o, lse) if return_lse else o


def _sees_nothing(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """o and lse where no query sees a key; gradients are zeros."""
    B, T, H, _ = q.shape
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    zero = sum(x.flatten()[:0].sum(dtype=wide) for x in (q, k, v, g) if x is not None)
    o = (q.new_zeros(B, T, H, v.shape[-1], dtype=wide) + zero).to(q.dtype)
    if sinks is None:
        return o, q.new_full((B, H, T), -torch.inf, dtype=wide) + zero
    return o, sinks.to(wide)[:, None].expand(B, H, T) + zero


def _keys_of(
    cu_seqlens: Tensor | None, cu_seqlens_k: Tensor | None, key_lengths: Tensor | None, k: Tensor
) -> Tensor | None:
    """The offsets of the keys: beside packed queries without lengths they are packed alike."""
    if cu_seqlens_k is not None:
        if cu_seqlens is None:
            raise ValueError("cu_seqlens_k: wants packed queries, cu_seqlens, beside it; got None")
        checks.expect_cu_seqlens(cu_seqlens_k, *k.shape[:2])
        checks.expect_shape("cu_seqlens_k", cu_seqlens_k, cu_seqlens.shape)
        return cu_seqlens_k
    return cu_seqlens if key_lengths is None else None


def window_of(window_size: int | tuple[int, int] | None, causal: bool) -> tuple[int, int]:
    """(left, right), -1 for no bound"""
    if window_size is None:
        left = right = -1
    elif isinstance(window_size, int):
        if window_size < 1:
            raise ValueError(f"window_size: want at least 1 key, got {window_size}")
        left = right = window_size - 1
    else:
        given = window_size.tolist() if isinstance(window_size, Tensor) else window_size
        left, right = (max(x, -1) for x in given)
    if causal:
        right = 0 if right < 0 else min(right, 0)
    return left, right


def scale_of(scale: float | None, q: Tensor) -> float:
    """The scale, D^-0.5 for None."""
    if scale is None:
        if not q.shape[-1]:
            raise ValueError("q: want at least one feature, or a scale, got D = 0")
        return float(q.shape[-1] ** -0.5)
    return float(scale)


def check_softcap(softcap: float | None) -> None:
    if softcap is not None and not softcap >= 0:
        raise ValueError(f"softcap: want a positive number or None, got {softcap}")


def _seed(dropout_p: float, q: Tensor) -> Tensor | None:
    """int64 [1] by torch's generator, so that checkpointing and manual_seed repeat it."""
    if not isinstance(dropout_p, int | float):
        raise TypeError(f"dropout_p: want a number, got {type(dropout_p).__name__}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p: want a probability from 0 to 1, got {dropout_p}")
    if not dropout_p:
        return None
    return torch.randint(2**62, (1,), device=q.device)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    k_offsets: Tensor | None,
    key_lengths: Tensor | None,
) -> None:
    if cu_seqlens is None and key_lengths is None and _plainly_fit(q, k, v):
        return  # what is checked below takes as long as a launch
    checks.expect_rank("q", q, 4, "[B, T, H, D]")
    checks.expect_rank("k", k, 4, "[B, S, HKV, D]")
    checks.expect_rank("v", v, 4, "[B, S, HKV, DV]")
    batch, tokens, heads, width = q.shape
    keys, key_heads = k.shape[1:3]
    sequences = rows = batch
    if cu_seqlens is not None:
        checks.expect_cu_seqlens(cu_seqlens, batch, tokens)
        sequences = cu_seqlens.shape[0] - 1
        rows = 1 if k_offsets is not None else sequences
        if k_offsets is cu_seqlens:
            keys = tokens
    checks.expect_shape("k", k, (rows, keys, key_heads, width))
    checks.expect_shape("v", v, (rows, keys, key_heads, v.shape[3]))
    if cu_seqlens is not None and not torch.compiler.is_compiling():
        expect_offsets("cu_seqlens", cu_seqlens, tokens)
        if k_offsets is not None and k_offsets is not cu_seqlens:
            expect_offsets("cu_seqlens_k", k_offsets, keys)
    checks.expect_multiple("heads of q", heads, "heads of k", key_heads)
    checks.expect_floating({"q": q, "k": k, "v": v})
    checks.expect_one_device({"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens})
    checks.expect_one_device({"q": q, "cu_seqlens_k": k_offsets, "key_lengths": key_lengths})
    if key_lengths is not None:
        checks.expect_shape("key_lengths", key_lengths, (sequences,))
        if key_lengths.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"key_lengths: want int32 or int64, got {key_lengths.dtype}")


def _plainly_fit(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether q, k and v have one dtype and device, and shapes that fit."""
    if not q.dim() == k.dim() == v.dim() == 4:
        return False
    (B, _, H, D), of_k, of_v = q.shape, k.shape, v.shape
    fit = of_k[0] == B and of_k[3] == D and of_v[:3] == of_k[:3] and of_k[2] and H % of_k[2] == 0
    alike = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    return bool(fit) and alike and q.is_floating_point()


def _check_biases(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    cu_seqlens: Tensor | None,
    right: int,
) -> None:
    if g is None and sinks is None and slopes is None:
        return
    heads = q.shape[2]
    given = {"g": g, "sinks": sinks, "alibi_slopes": slopes}
    checks.expect_floating(given)
    checks.expect_one_device({"q": q, **given})
    if g is not None:
        checks.expect_shape("g", g, (*k.shape[:2], heads))
        if right != 0:
            raise ValueError("g: want causal=True beside a forgetting gate, got causal=False")
    if sinks is not None:
        checks.expect_shape("sinks", sinks, (heads,))
    check_slopes(slopes, heads, q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)


def check_slopes(slopes: Tensor | None, heads: int, sequences: int) -> None:
    if slopes is not None and tuple(slopes.shape) != (heads,):
        checks.expect_shape("alibi_slopes", slopes, (sequences, heads))
