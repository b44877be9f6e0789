"""Softmax attention in the layout [B, T, H, D], and decoding by a cache of latents that stand for
the keys and values of all heads (slipstream/kernels/attention/latent.py).
"""

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from slipstream.common import checks, key_blocks
from slipstream.kernels.attention import latent as kernels
from slipstream.kernels.attention.inputs import Asked, AttentionInputs, AttentionOptions
from slipstream.kernels.attention.rotary import softmax_of_rotated
from slipstream.kernels.attention.run import plan_of_rotated, run
from slipstream.kernels.elementwise.rotary import unsupported_reason as rotary_unsupported
from slipstream.kernels.selected_attention import op as selection
from slipstream.ops._attention_trees import run_in_tree
from slipstream.ops._block_masks import lists_of
from slipstream.ops.rotary import rotary_heads
from slipstream.runtime import token_ids, trees
from slipstream.runtime.autograd import by_operation, needs_autograd
from slipstream.runtime.context_parallel import ContextParallel
from slipstream.runtime.launch_cache import of_thread
from slipstream.runtime.prefix_tree import PrefixTree


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
    parents: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    key_lengths: Tensor | None = None,
    context: ContextParallel | None = None,
    dropout_p: float = 0.0,
    return_lse: Literal[False] = False,
    selected: Tensor | None = None,
    block: int = 1,
    tail: bool = False,
    block_mask: Any = None,
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
    parents: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    key_lengths: Tensor | None = None,
    context: ContextParallel | None = None,
    dropout_p: float = 0.0,
    return_lse: Literal[True],
    selected: Tensor | None = None,
    block: int = 1,
    tail: bool = False,
    block_mask: Any = None,
    impl: str | None = None,
    consistent: bool = False,
) -> tuple[Tensor, Tensor]: ...
@checks.operator
@trees.as_context
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
    parents: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    key_lengths: Tensor | None = None,
    context: ContextParallel | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    selected: Tensor | None = None,
    block: int = 1,
    tail: bool = False,
    block_mask: Any = None,
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
        parents: int32 or int64 [N], the earlier sequence at whose end each goes on, -1 for none: a
            row of prefix trees (PrefixTree), whose tokens see those of all ancestors. Causal, and
            not with cu_seqlens_k or key_lengths.
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
        selected: int32 [B, T, G, N], G = 1, HKV or H (slow): a query sees the keys of the blocks in
            its list and, where window_size is given, those of the window beside them, each key once
            and in one softmax; under causal none that is later. Block i of a sequence has its keys
            from i * block on. In any order, repeats count once, -1 (or less) is none, and so is a
            block past its sequence's end. Without g, alibi_slopes, softcap, dropout, context and
            consistent.
        block: 1, 4, 16, 64 or 128, how many keys an entry of selected is.
        tail: a query at position p also sees the keys of the block that is open at it, those from
            (p + 1) // block * block to p.
        block_mask: torch's BlockMask, [1 or B, 1 or H (slow), T, S], of any mask function: it says
            which keys a query sees, not causal. It becomes lists of the largest blocks that every
            query sees whole, once (what its function reads may not change), in 2 B H T S calls and
            a wait; compiled graphs break. Not with selected, what that refuses, windows or offsets.
        impl: None chooses; "sm90", "triton", "eager" or "reference" is used or refused.
        consistent: the same bits for a query however many others there are, one or a whole prompt,
            with or without gradients, and whatever else there is in the batch. Causal calls of at
            least as many keys as queries, without context or dropout. In plain torch slow.

    Returns:
        o [B, T, H, DV] in q's dtype; 0 for a query that sees nothing. With return_lse also lse
        [B, H, T], float32 or q's float64; -inf for a query that sees nothing, not even a sink.
        Gradients flow through both, to q, k, v, g and sinks.

    Raises:
        ValueError: shapes do not fit, a negative window, dropout_p is no probability, cu_seqlens
            are no offsets, or selected is not int32 or has a block past all keys (on CUDA in a
            later call, runtime/token_ids.py: it selects nothing).
        TypeError: dtypes. NotImplementedError: impl cannot do it.

    Cost: 2 B H T S (D + DV) flops, of which those that no query sees are skipped; memory linear
        in T. Deterministic, also backward. With selected the pairs of the lists, and those that
        neighbouring queries' lists have more.
    Source: Vaswani et al., Attention Is All You Need, 2017; Dao et al., FlashAttention, 2022; Press
        et al., ALiBi, 2021; Lin et al., Forgetting Transformer, 2025; DeepSeek-AI, DeepSeek-V3.2,
        2025 (selected).
    """
    if block_mask is not None:
        beside = {"selected": selected, "window_size": window_size, "cu_seqlens": cu_seqlens}
        beside |= {"cu_seqlens_k": cu_seqlens_k, "key_lengths": key_lengths, "context": context}
        beside |= {"block": block, "tail": tail}
        selected, block, causal = trees.eagerly(lists_of, block_mask, q, k, beside)
    nothing = type(window_size) is int and window_size == 0
    window = window_of(1 if nothing else window_size, causal)
    factor, cap = scale_of(scale, q), softcap_of(softcap)
    options = AttentionOptions(factor, *window, cap, float(dropout_p))
    k_offsets = cu_seqlens if cu_seqlens_k is None and key_lengths is None else cu_seqlens_k
    seed = _seed(dropout_p, q)
    terms = AttentionInputs(
        q, k, v, g, sinks, alibi_slopes, cu_seqlens, k_offsets, key_lengths, seed
    )
    asked = Asked(impl, return_lse, nothing, consistent)
    selects = selected is not None or block != 1 or tail
    if isinstance(context, PrefixTree):
        if selects:
            raise NotImplementedError("selected: not with parents")
        o, lse = run_in_tree(terms, options, asked, context)
    elif not selects:
        o, lse = run(terms, options, asked, context)
    else:
        by = selection.arguments.SelectedBy(selected, block, tail, causal, window_size is not None)
        o, lse = selection.run(terms, options, asked, context, by)
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
    trains = (
        not by_operation()
        and checks.autocast_dtype(qkv) in (None, qkv.dtype)
        and needs_autograd(qkv)
    )
    if trains and rotary_unsupported(qkv, tables[0].shape[-1]) is None:
        impls = plan_of_rotated(terms, options)
    if impls is None:
        q, k, v = rotary_heads(qkv, tables, sizes)
        return attention(q, k, v, window_size=window_size, cu_seqlens=cu_seqlens)
    # selective checkpointing may hand out qkv again
    plain = _get_current_dispatch_mode() is None or of_thread.warmup is not None
    return softmax_of_rotated(qkv, *tables, cu_seqlens, sizes, options, impls, fresh and plain)


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
    return left, 0 if causal else right


def scale_of(scale: float | None, q: Tensor) -> float:
    """The scale, D^-0.5 for None."""
    if scale is None:
        if not q.dim() or not q.shape[-1]:
            raise ValueError("q: want at least one feature, or a scale, got D = 0")
        return float(q.shape[-1] ** -0.5)
    return float(scale)


def softcap_of(softcap: float | None) -> float:
    """The bound of scores, 0 for none."""
    if softcap is not None and not softcap >= 0:
        raise ValueError(f"softcap: want a positive number or None, got {softcap}")
    return float(softcap or 0.0)


def _seed(dropout_p: float, q: Tensor) -> Tensor | None:
    """int64 [1] by torch's generator, so that checkpointing and manual_seed repeat it."""
    if not isinstance(dropout_p, int | float):
        raise TypeError(f"dropout_p: want a number, got {type(dropout_p).__name__}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p: want a probability from 0 to 1, got {dropout_p}")
    if not dropout_p:
        return None
    return torch.randint(2**62, (1,), device=q.device)


@checks.operator
def latent_attention(
    q: Tensor,
    latent: Tensor,
    lengths: Tensor | None = None,
    *,
    width: int,
    scale: float,
    table: Tensor | None = None,
    selected: Tensor | None = None,
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
        selected: int32 [B, T, N], the keys that a query sees, of those up to its own. In any order,
            repeats count once, a negative one is none. One past all keys is none too; on the CPU a
            ValueError, on CUDA in a later call.
        impl: None chooses; "triton" or "eager" is used or refused.

    Returns:
        o [B, T, H, R] in q's dtype; 0 for a query that sees nothing.

    Raises:
        ValueError: shapes do not fit, or a page or a key is past the cache. TypeError: dtypes.
        NotImplementedError: impl cannot do it, or keys with `selected` are 2^31 or more.

    Cost: 2 B H T S (2 R + P) flops, the cache read once; gradients are plain torch's, B H T S
        numbers. With selected S is N, each query reads its own, and gradients keep B T N (R + P)
        numbers more. Deterministic.
    Source: DeepSeek-AI, DeepSeek-V2, 2024; DeepSeek-V3.2, 2025 (selected).
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
    how: dict[str, Any] = {"width": width, "scale": scale, "impl": impl}
    if selected is None:
        return kernels.latent_attention(q, latent, lengths, table=table, **how)
    checks.expect_rank("selected", selected, 3, "[B, T, N]")
    checks.expect_shape("selected", selected, (*q.shape[:2], selected.shape[2]))
    if selected.dtype != torch.int32:
        raise TypeError(f"selected: want int32, got {selected.dtype}")
    checks.expect_one_device({"q": q, "selected": selected})
    if latent.shape[0] * latent.shape[1] >= 2**31:
        raise NotImplementedError("selected: keys are counted in 32 bits")
    keys = latent.shape[1] * (1 if table is None else table.shape[1])
    token_ids.expect_below("selected", selected, keys, "keys of latent")
    if not keys:
        return q.new_zeros(*q.shape[:3], width)
    if lengths is None:
        lengths = torch.full((batch,), keys, device=q.device)
    # partial results of 1 GiB
    step = max((1 << 28) // max(batch * q.shape[2] * width, 1), 1)
    parts, after = [], checks.plain_int(q.shape[1])
    for own, lists in zip(q.split(step, 1), selected.split(step, 1)):
        after -= own.shape[1]
        used = lengths.clamp(max=keys) - after
        rows, counts, _ = key_blocks.pieces_of_blocks(lists, used, table, latent.shape[:2])
        # a page a key, and a sequence a query
        each, pages = own.flatten(0, 1)[:, None], latent.flatten(0, 1)[:, None]
        o = kernels.latent_attention(each, pages, counts, table=rows, **how)
        parts.append(o.view(*own.shape[:3], width))
    return torch.cat(parts, 1)
