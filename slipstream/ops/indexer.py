"""The indexer of selected attention: which blocks of keys each query attends to, and its loss."""

import torch
from torch import Tensor

from slipstream.common import checks, key_blocks
from slipstream.kernels.indexer import inputs, loss, op
from slipstream.ops.attention import scale_of


@checks.operator
def index(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None = None,
    *,
    topk: int,
    block: int = 1,
    groups: int = 1,
    local: int = 0,
    activation: str = "relu",
    pool: str = "max",
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    key_lengths: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """The blocks of keys that score highest, for ops.attention(..., selected=).

        x_tgs = sum_h w_th f(q_th . k_s)     over the HI / groups heads of list g
        x_tgj = max over the keys s <= t of block j of x_tgs
                or, with pool="mean", of the mean of a block's keys in k_s's place

    A query chooses among the blocks that have begun, or with pooled keys among the complete ones:
    attention's tail=True has it see its own until then. Equal scores: the earlier block.

    Args:
        q: [B, T, HI, D], any floating dtype; the last query is at the last key's position.
        k: [B, S, D] in q's dtype. With pool="none" a row is a block, [B, S // block, D] or more; a
            packed sequence has its tokens // block rows, one sequence's behind the other's.
        weights: [B, T, HI], any floating dtype; None is 1.
        topk: blocks a list.
        block: 1, 4, 16, 64 or 128 keys, counted from a sequence's first.
        groups: lists a query; HI is a multiple of it.
        local: the last so many of the blocks that a query chooses among are always listed, at most
            topk.
        activation: f, "relu" or "identity".
        pool: "max", "mean" or "none".
        causal: else every query chooses among all blocks.
        cu_seqlens: int32 or int64 [N+1], offsets of N sequences packed in B = 1.
        key_lengths: int32 or int64 [B], or [N] if packed with k [N, S, D]: keys in use; None is S,
            or T of blocks' rows. Negative is none.
        impl: None chooses; "triton" or "eager" is used or refused.

    Returns:
        int32 [B, T, groups, topk], ascending, -1 behind a list that has fewer. No gradient.

    Raises:
        ValueError: sizes or names do not fit. TypeError: dtypes.
        NotImplementedError: impl cannot do it.

    Cost: 2 B T S HI D flops, half of it if causal; scores are stored of a few tiles of queries.
        Deterministic.
    Source: DeepSeek-AI, DeepSeek-V3.2, 2025; MiniMax, MiniMax Sparse Attention, 2026.
    """
    x = _indexing(
        q, k, weights, (cu_seqlens, key_lengths), (block, groups), (activation, pool), causal
    )
    for name, value in (("topk", topk), ("local", local)):
        checks.expect_not_negative(name, value)
    if local > topk:
        raise ValueError(f"local: want at most the {topk} blocks of a list, got {local}")
    return op.select(x, int(topk), int(local), impl)


@checks.operator
def index_loss(
    q: Tensor,
    k: Tensor,
    queries: Tensor,
    keys: Tensor,
    weights: Tensor | None = None,
    *,
    selected: Tensor | None = None,
    block: int = 1,
    groups: int = 1,
    activation: str = "relu",
    pool: str = "max",
    scale: float | None = None,
    attention_scale: float | None = None,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """How far an indexer's softmax is from the attention that it selects for.

        p_h = softmax(attention_scale queries_h . keys)     over the keys that attention sees
        p = mean of p_h over the list's heads, its entries alone, divided by their sum
        loss = mean over queries and lists of KL(p || softmax(scale x))     x: ops.index's scores

    Entries are keys, or blocks, whose keys' p add up, where k is pooled; there attention also sees
    a query's own block while it is not complete, which is no entry.

    Args:
        q, k, weights, block, groups, activation, pool, causal, cu_seqlens: as index has them, k of
            as many tokens as q.
        queries: [B, T, H, DK], keys: [B, T, HKV, DK], of the attention; HKV is a multiple of
            groups, and gets no gradient.
        selected: int32 [B, T, groups, N], blocks that attention sees, repeats count once, -1 is
            none; None is all.
        scale: of the indexer's scores, None is D^-0.5.
        attention_scale: None is DK^-0.5.

    Returns:
        A number, float32 or q's float64. Gradients flow to q, k and weights.

    Raises:
        ValueError: sizes or names do not fit. TypeError: dtypes.

    Cost: of a tile of queries at a time, memory linear in T: of each entry of a query 2 HI D flops
        and three times that with gradients, of each key that attention sees 2 H DK. Without lists
        entries are all of a sequence, and packed ones wait for their lengths. Plain torch.
    Source: DeepSeek-AI, DeepSeek-V3.2, 2025.
    """
    words = activation, pool
    x = _indexing(q, k, weights, (cu_seqlens, None), (block, groups), words, causal)
    checks.expect_rank("queries", queries, 4, "[B, T, H, DK]")
    (B, T, _, D), (H, DK) = q.shape, queries.shape[2:]
    checks.expect_shape("queries", queries, (B, T, H, DK))
    checks.expect_rank("keys", keys, 4, "[B, T, HKV, DK]")
    checks.expect_shape("keys", keys, (B, T, keys.shape[2], DK))
    if pool != "none" or block == 1:
        checks.expect_shape("k", k, (B, T, D))
    checks.expect_floating({"queries": queries, "keys": keys})
    checks.expect_one_device({"q": q, "queries": queries, "keys": keys, "selected": selected})
    checks.expect_multiple("queries' heads", H, "keys' heads", keys.shape[2])
    checks.expect_multiple("keys' heads", keys.shape[2], "groups", groups)
    if selected is not None:
        checks.expect_rank("selected", selected, 4, "[B, T, groups, N]")
        checks.expect_shape("selected", selected, (B, T, groups, selected.shape[3]))
        if selected.dtype != torch.int32:
            raise TypeError(f"selected: want int32, got {selected.dtype}")
    scales = scale_of(scale, q), scale_of(attention_scale, queries)
    return loss.index_loss(x, (queries, keys), selected, scales)


def _indexing(
    q: Tensor,
    k: Tensor,
    weights: Tensor | None,
    offsets: tuple[Tensor | None, Tensor | None],
    blocks: tuple[int, int],
    words: tuple[str, str],
    causal: bool,
) -> inputs.Indexing:
    """What is asked for, once it fits; keys pooled."""
    (cu_seqlens, key_lengths), (block, groups), (activation, pool) = offsets, blocks, words
    checks.expect_rank("q", q, 4, "[B, T, HI, D]")
    checks.expect_rank("k", k, 3, "[B, S, D]")
    checks.expect_floating({"q": q, "k": k, "weights": weights})
    checks.expect_one_dtype({"q": q, "k": k})
    tensors = {"weights": weights, "cu_seqlens": cu_seqlens, "key_lengths": key_lengths}
    checks.expect_one_device({"q": q, "k": k, **tensors})
    (B, T, HI, D), S = q.shape, k.shape[1]
    if weights is not None:
        checks.expect_shape("weights", weights, (B, T, HI))
    known = {"block": key_blocks.SIZES, "activation": ("relu", "identity")}
    known["pool"] = "max", "mean", "none"
    for (name, allowed), value in zip(known.items(), (block, *words)):
        if value not in allowed:
            raise ValueError(f"{name}: want one of {allowed}, got {value!r}")
    if groups < 1:
        raise ValueError(f"groups: want 1 or more, got {groups}")
    checks.expect_multiple("q's heads", HI, "groups", groups)
    rows = T // block if pool == "none" else T
    sequences = B
    if cu_seqlens is not None:
        checks.expect_cu_seqlens(cu_seqlens, B, T)
        sequences = B if key_lengths is None else len(cu_seqlens) - 1
    checks.expect_shape("k", k, (sequences, S, D))
    if key_lengths is not None:
        checks.expect_index("key_lengths", key_lengths, (sequences,))
    elif cu_seqlens is not None and pool != "none":
        checks.expect_shape("k", k, (B, T, D))
    elif pool == "none" and rows > S:
        raise ValueError(f"k: want a row for each of {rows} blocks, got {S}")
    if pool == "mean" and block > 1:
        if key_lengths is None and cu_seqlens is None and S != T:
            key_lengths = torch.full((B,), S, device=q.device)
        elif key_lengths is not None:
            key_lengths = key_lengths.clamp(max=S)
        k = key_blocks.pooled_keys(k, block, cu_seqlens if key_lengths is None else None)
    given = q, k, weights, cu_seqlens, key_lengths
    relu, pooled = activation == "relu", pool != "max"
    return inputs.Indexing(*given, block, groups, relu, pooled and block > 1, causal)
