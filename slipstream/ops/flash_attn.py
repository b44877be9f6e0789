"""The names, arguments and shapes of the flash_attn package, by this library's kernels.

`deterministic` and `num_splits` change nothing: every result is the same in every run, and how a
cache is cut is decided here.
"""

import torch
from torch import Tensor

from slipstream.common import checks, key_blocks, rounded_keys
from slipstream.kernels.attention import inputs, op
from slipstream.kernels.attention.cache import Cache, check_values, gather, present
from slipstream.kernels.attention.dispatch import decode, plan_cache
from slipstream.kernels.selected_attention.inputs import SelectedBy
from slipstream.ops.attention import attention, scale_of, softcap_of, window_of
from slipstream.ops.rotary import rotary_embedding
from slipstream.runtime.token_ids import expect_below, expect_offsets

Result = Tensor | tuple[Tensor, Tensor, None]


@checks.operator
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
) -> Result:
    """Softmax attention: slipstream.ops.attention with flash_attn's arguments.

    Args:
        q: [B, T, H, D]. k: [B, S, HKV, D]. v: [B, S, HKV, DV].
        dropout_p: as attention has it. softmax_scale: None is D^-0.5.
        causal: the last query is aligned with the last key.
        window_size: (left, right) keys seen before and after a query's own, -1 for no bound.
        softcap: c > 0 for c tanh(x / c), 0 for none.
        alibi_slopes: [H] or [B, H], of -slope |distance|.
        return_attn_probs: also return lse, and None.
        sinks: [H], a score beside those of the keys.

    Returns:
        o [B, T, H, DV]; or o, lse [B, H, T] (-inf where nothing is seen), None.

    Raises:
        ValueError: shapes do not fit. TypeError: dtypes.

    Source: Dao, FlashAttention-2, 2023, whose interface this is.
    """
    o, lse = attention(
        q,
        k,
        v,
        scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        sinks=sinks,
        return_lse=True,
    )
    return (o, lse, None) if return_attn_probs else o


@checks.operator
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
) -> Result:
    """flash_attn_func on packed sequences.

    Args:
        q: [T, H, D], the queries of N sequences, one after another.
        k, v: [S, HKV, D] and [S, HKV, DV]; or with block_table pages [M, P, HKV, ...].
        cu_seqlens_q, cu_seqlens_k: int32 [N+1], where each sequence begins.
        max_seqlen_q, max_seqlen_k: not needed, and not read.
        block_table: int32 [N, pages], the pages of each sequence, negative where there is none: a
            sequence that has keys in such a page sees nothing, o is 0. They are copied into one
            tensor first; flash_attn_with_kvcache reads them where they are.
        The rest: as flash_attn_func.

    Returns:
        o [T, H, DV]; or o, lse [H, T], None.

    Raises:
        ValueError: shapes do not fit. TypeError: dtypes.
    """
    checks.expect_rank("q", q, 3, "[T, H, D]")
    lengths, offsets = None, cu_seqlens_k
    _check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0], q)
    checks.expect_shape("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape)
    if block_table is None:
        checks.expect_rank("k", k, 3, "[S, HKV, D]")
        checks.expect_rank("v", v, 3, "[S, HKV, DV]")
        _check_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0], q)
        k, v = k[None], v[None]
    else:
        _check_pages(k, v, block_table, cu_seqlens_q.shape[0] - 1)
        _expect_index("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, q)
        queries = q.new_empty(block_table.shape[0], 0, *q.shape[1:])
        cache = Cache(queries, k, v, cu_seqlens_k.diff(), table=block_table)
        check_values(cache)
        _, k, v, *_ = gather(cache)
        lengths, offsets = present(cache), None
    o, lse = attention(
        q[None],
        k,
        v,
        scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        cu_seqlens=cu_seqlens_q,
        cu_seqlens_k=offsets,
        key_lengths=lengths,
        dropout_p=dropout_p,
        sinks=sinks,
        return_lse=True,
    )
    return (o[0], lse[0], None) if return_attn_probs else o[0]


@checks.operator
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    selected: Tensor | None = None,
    block: int = 1,
    tail: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries to a cache, into which new keys are written first. No gradients.

    Args:
        q: [B, T, H, D], the last query aligned with the last key.
        k_cache, v_cache: [N, S, HKV, D] and [N, S, HKV, DV], N >= B; or with block_table pages
            [M, P, HKV, ...] of any size P.
        k, v: [B, T', HKV, D] and [B, T', HKV, DV] in q's dtype, written after the cache_seqlens
            keys in the cache. What does not fit is a ValueError on a CPU; on a GPU it is dropped,
            and the next call raises.
        rotary_cos, rotary_sin: [S, R/2], turn k by its place in the cache, and q by its own if
            causal or windowed, else by the first new one's.
        cache_seqlens: int32 [B] or one for all: keys in the cache before this call; None is S.
            Where it is negative nothing is written or read, and o is 0.
        cache_batch_idx: int32 [B], the rows of the cache, negative as cache_seqlens. Not beside a
            block_table.
        cache_leftpad: int32 [B], the first keys of a row that are no keys; negative is 0. Not
            beside a block_table.
        block_table: int32 [B, pages]. Nothing is written into a negative page, and it has no keys.
            An index past the cache is a ValueError on the CPU, on a GPU it is as a negative one and
            the next call raises.
        sinks: [H], a score beside those of the keys.
        k_scale, v_scale: float32, k_cache and v_cache without their last dimension, of caches in
            int8 or float8_e4m3fn: key = scale code. New keys are rounded to codes, each with the
            scale of its largest number, so that an error of o is at most about 1% in int8 and 4%
            in float8.
        selected, block, tail: as ops.attention has them, blocks of a sequence's keys, those just
            written counted; a query sees none behind its own. Not beside cache_leftpad,
            alibi_slopes or a window, and of several queries with causal alone.
        impl: None chooses; "triton" or "eager" is used or refused.
        The rest: as flash_attn_func.

    Returns:
        o [B, T, H, DV]; with return_softmax_lse also lse [B, H, T].

    Raises:
        ValueError: shapes do not fit, or one argument wants another. TypeError: dtypes.
        NotImplementedError: selected beside what it does not take.

    Cost: the keys and values in use are read once for all heads and queries, with selected those of
        its list by each query, in pieces of as many keys as divide a page and a block. A cache in
        8 bits has
        (D + 4) / (2 D) of bfloat16's bytes; with q in 16 bits and D a multiple of 4 the call takes
        less time than bfloat16's on long caches, else more.
    Source: Dao et al., Flash-Decoding, 2023.
    """
    _check_cache(q, k_cache, v_cache, k_scale, v_scale)
    _check_rows(q, k_cache, v_cache, cache_batch_idx, cache_leftpad, block_table)
    _check_biases(q, sinks, alibi_slopes, softcap)
    lengths = _lengths(cache_seqlens, q)
    left, right = window_of(window_size, causal)
    by = _selection(q, k_cache, selected, block, tail)
    if by is not None:
        lacks = {"window_size": max(window_size) >= 0, "alibi_slopes": alibi_slopes is not None}
        lacks |= {"cache_leftpad": cache_leftpad is not None}
        lacks |= {"causal=False of several queries": q.shape[1] > 1 and not causal}
        for name in (x for x, given in lacks.items() if given):
            raise NotImplementedError(f"{name}: is not implemented with selected")
    rows = None if cache_batch_idx is None else cache_batch_idx.contiguous()
    pad = None if cache_leftpad is None else cache_leftpad.contiguous()
    table = None if block_table is None else block_table.contiguous()
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos, rotary_sin: want both or neither, got one")
    biases = sinks, alibi_slopes
    cache = Cache(q, k_cache, v_cache, lengths, rows, pad, table, *biases, k_scale, v_scale)
    if k is not None or v is not None:
        if k is None or v is None or lengths is None:
            raise ValueError("k: wants v and cache_seqlens beside it, got None")
        _check_new(k, v, cache)
        if q.is_cpu and pad is not None:  # `append` looks at all others, before it writes
            check_values(cache, k.shape[1])
        if rotary_cos is not None and rotary_sin is not None:
            _check_rotary(rotary_cos, rotary_sin, k)
            together = left < 0 and right < 0
            q = _turned(q, rotary_cos, rotary_sin, lengths, rotary_interleaved, together)
            k = _turned(k, rotary_cos, rotary_sin, lengths, rotary_interleaved, False)
        with torch.no_grad():
            chosen = plan_cache(k, k_cache, v_cache, impl)
            lengths = _append(cache, k, v, lengths, chosen)
    elif rotary_cos is not None:
        raise ValueError("rotary_cos: wants k and v beside it, got None")
    scale = scale_of(softmax_scale, q)
    cache = cache._replace(q=q, lengths=lengths)
    options = inputs.AttentionOptions(scale, left, right, float(softcap or 0.0))
    if by is not None:
        o, lse = _of_selected(cache, options, by, impl)
    else:
        o, lse = decode(cache, options, impl)
    return (o, lse) if return_softmax_lse else o


def _selection(
    q: Tensor, k: Tensor, selected: Tensor | None, block: int, tail: bool
) -> SelectedBy | None:
    if selected is None:
        if block != 1 or tail:
            raise ValueError("selected: want lists beside block or tail, got None")
        return None
    if block not in key_blocks.SIZES:
        raise ValueError(f"block: want one of {key_blocks.SIZES}, got {block}")
    checks.expect_rank("selected", selected, 4, "[B, T, G, N]")
    G = selected.shape[2]
    if G not in (1, k.shape[2], q.shape[2]):
        kinds = f"1, {k.shape[2]} or {q.shape[2]}"
        raise ValueError(f"selected: want lists of {kinds} heads, got {G}")
    checks.expect_shape("selected", selected, (*q.shape[:2], G, selected.shape[3]))
    if selected.dtype != torch.int32:
        raise ValueError(f"selected: want int32, got {selected.dtype}")
    checks.expect_one_device({"q": q, "selected": selected})
    if k.shape[0] * k.shape[1] >= 2**31:
        raise NotImplementedError("selected: keys are counted in 32 bits")
    return SelectedBy(selected, int(block), bool(tail), True, False)


def _of_selected(
    cache: Cache, options: inputs.AttentionOptions, by: SelectedBy, impl: str | None
) -> tuple[Tensor, Tensor]:
    """o and lse where each query is a sequence, whose pages are pieces of what its list names; the
    heads of a list at a time."""
    q, k, selected = cache.q, cache.k, by.selected
    assert selected is not None
    (B, T, H, _), (HKV, G) = q.shape, (k.shape[2], selected.shape[2])
    blocks = -(-cache.capacity // by.block)
    expect_below("selected", selected.flatten(1), blocks, "blocks of keys")
    check_values(cache)
    if not cache.capacity:  # a page that none reads
        cache = cache._replace(
            k=k.new_zeros(1, 1, *k.shape[2:]), v=cache.v.new_zeros(1, 1, *cache.v.shape[2:])
        )
    table, lengths = cache.table, cache.lengths
    if cache.rows is not None:
        table = cache.rows[:, None]
    lengths = torch.full((B,), cache.capacity, device=q.device) if lengths is None else lengths
    lengths = lengths.clamp(max=cache.capacity)
    parts = []
    for g in range(G):
        of = (selected[:, :, g], lengths, table, k.shape[:2], by.block, by.tail)
        pages, counts, P = key_blocks.pieces_of_blocks(*of)
        own = slice(g * H // G, (g + 1) * H // G)
        read = slice(g * HKV // G, max((g + 1) * HKV // G, g * HKV // G + 1))
        every = [cache.k, cache.v, cache.k_scale, cache.v_scale]
        cut = [None if x is None else _pieces(x[:, :, read], P) for x in every]
        assert cut[0] is not None and cut[1] is not None
        sinks = None if cache.sinks is None else cache.sinks[own]
        each = Cache(q[:, :, own].flatten(0, 1)[:, None], cut[0], cut[1], counts, table=pages)
        each = each._replace(sinks=sinks, k_scale=cut[2], v_scale=cut[3])
        parts.append(decode(each, options, impl))
    o, lse = (torch.cat(x, 2 - i) for i, x in enumerate(zip(*parts)))
    return o.unflatten(0, (B, T))[:, :, 0], lse.view(B, T, H).transpose(1, 2)


def _pieces(x: Tensor, keys: int) -> Tensor:
    """[N, S, ...] as [N S / keys, keys, ...], a view."""
    return x.unflatten(1, (-1, keys)).flatten(0, 1)


def _append(cache: Cache, k: Tensor, v: Tensor, lengths: Tensor, impl: str) -> Tensor:
    """Writes new keys, in 8 bits if the cache is, and returns the lengths after that."""
    k_scale, v_scale, at = cache.k_scale, cache.v_scale, (lengths, cache.rows, cache.table)
    if k_scale is None or v_scale is None:
        return op.append(cache.k, cache.v, k, v, *at, impl=impl)
    (k, new_k), (v, new_v) = (rounded_keys.encode(x, cache.k.dtype) for x in (k, v))
    op.append(*(x[..., None] for x in (k_scale, v_scale, new_k, new_v)), *at, impl=impl)
    return op.append(*(x.view(torch.int8) for x in (cache.k, cache.v, k, v)), *at, impl=impl)


def _check_offsets(name: str, offsets: Tensor, tokens: int, q: Tensor) -> None:
    checks.expect_cu_seqlens(offsets, 1, tokens, name=name)
    checks.expect_one_device({"q": q, name: offsets})
    if not torch.compiler.is_compiling():
        expect_offsets(name, offsets, tokens)


def _lengths(cache_seqlens: int | Tensor | None, q: Tensor) -> Tensor | None:
    if cache_seqlens is None:
        return None
    if isinstance(cache_seqlens, int):
        return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    _expect_index("cache_seqlens", cache_seqlens, (q.shape[0],), q)
    return cache_seqlens.contiguous()


def _turned(
    x: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, interleaved: bool, together: bool
) -> Tensor:
    """x at its positions in the cache, which never leave the table."""
    step = torch.arange(x.shape[1], device=x.device)
    at = lengths.long()[:, None] + (0 * step if together else step)
    at = at.clamp(0, max(cos.shape[0] - 1, 0))
    return rotary_embedding(x, cos, sin, positions=at, interleaved=interleaved)


def _check_new(k: Tensor, v: Tensor, cache: Cache) -> None:
    sequences, k_cache, v_cache = cache.q.shape[0], cache.k, cache.v
    checks.expect_rank("k", k, 4, "[B, T, HKV, D]")
    checks.expect_shape("k", k, (sequences, k.shape[1], *k_cache.shape[2:]))
    checks.expect_shape("v", v, (sequences, k.shape[1], *v_cache.shape[2:]))
    like = {"k_cache": k_cache} if cache.k_scale is None else {"q": cache.q}
    checks.expect_one_dtype({**like, "k": k, "v": v})
    checks.expect_one_device({"k_cache": k_cache, "k": k, "v": v})
    if k.layout != torch.strided or v.layout != torch.strided:  # before anything is written
        checks.expect_dense({"k": k, "v": v}, TypeError("keys of another layout"))
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.stride(-1) != 1 and x.numel():
            raise ValueError(f"{name}: wants its last dimension contiguous to be written into")


def _check_rotary(cos: Tensor, sin: Tensor, k: Tensor) -> None:
    given = {"rotary_cos": cos, "rotary_sin": sin}
    checks.expect_rank("rotary_cos", cos, 2, "[S, R/2]")
    checks.expect_shape("rotary_sin", sin, cos.shape)
    checks.expect_floating(given)
    checks.expect_one_device({"k": k, **given})
    if 2 * cos.shape[1] > k.shape[3]:
        raise ValueError(
            f"rotary_cos: want at most {k.shape[3] // 2} columns, half of k's features, "
            f"got {cos.shape[1]}"
        )


def _check_cache(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> None:
    checks.expect_rank("q", q, 4, "[B, T, H, D]")
    checks.expect_rank("k_cache", k, 4, "[N, S, HKV, D]")
    checks.expect_shape("k_cache", k, (*k.shape[:3], q.shape[3]))
    checks.expect_rank("v_cache", v, 4, "[N, S, HKV, DV]")
    checks.expect_shape("v_cache", v, (*k.shape[:3], v.shape[3]))
    checks.expect_multiple("heads of q", q.shape[2], "heads of k_cache", k.shape[2])
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    checks.expect_one_device({"q": q, "k_cache": k, "v_cache": v, **scales})
    if k_scale is None and v_scale is None:
        checks.expect_one_dtype({"q": q, "k_cache": k, "v_cache": v})
        return
    checks.expect_floating({"q": q})
    if k.dtype not in rounded_keys.LARGEST:
        raise TypeError(f"k_cache: want int8 or float8_e4m3fn beside k_scale, got {k.dtype}")
    if v.dtype != k.dtype:
        raise TypeError(f"v_cache: want {k.dtype} like k_cache, got {v.dtype}")
    for (name, x), of in zip(scales.items(), (k, v)):
        if x is None:
            raise ValueError(f"{name}: want it beside the other scale, got None")
        checks.expect_shape(name, x, of.shape[:3])
        if x.dtype != torch.float32:
            raise TypeError(f"{name}: want torch.float32, got {x.dtype}")


def _check_rows(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None, pad: Tensor | None, table: Tensor | None
) -> None:
    B = q.shape[0]
    if table is not None:
        if rows is not None or pad is not None:
            raise ValueError("block_table: want cache_batch_idx and cache_leftpad to be None")
        _check_pages(k, v, table, B)
        return
    for name, x in (("cache_batch_idx", rows), ("cache_leftpad", pad)):
        if x is not None:
            _expect_index(name, x, (B,), q)
    if rows is None and k.shape[0] < B:
        raise ValueError(f"k_cache: want at least {B} rows, one a sequence, got {k.shape[0]}")


def _check_biases(
    q: Tensor, sinks: Tensor | None, slopes: Tensor | None, softcap: float | None
) -> None:
    given = {"sinks": sinks, "alibi_slopes": slopes}
    checks.expect_floating(given)
    checks.expect_one_device({"q": q, **given})
    if sinks is not None:
        checks.expect_shape("sinks", sinks, (q.shape[2],))
    inputs.check_slopes(slopes, q.shape[2], q.shape[0])
    softcap_of(softcap)


def _check_pages(k: Tensor, v: Tensor, table: Tensor, sequences: int) -> None:
    checks.expect_rank("k", k, 4, "[M, P, HKV, D]")
    checks.expect_rank("v", v, 4, "[M, P, HKV, DV]")
    checks.expect_rank("block_table", table, 2, "[N, pages]")
    _expect_index("block_table", table, (sequences, table.shape[1]), k)


def _expect_index(name: str, x: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    checks.expect_shape(name, x, shape)
    checks.expect_one_device({"q": like, name: x})
    checks.expect_index(name, x)
