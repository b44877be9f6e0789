"""The lists of an indexer: scores of blocks of keys, and the best of them; formulas in MATH.md.

A tile is some queries of one sequence. Its scores are all that is ever stored of them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.indexer.inputs import Indexing, flat, in_tiles
from slipstream.runtime import compile_ahead, custom_op, dispatch, token_ids


def select(x: Indexing, topk: int, local: int, impl: str | None) -> Tensor:
    """int32 [B, T, groups, topk]"""
    impl = dispatch.choose(_CANDIDATES, (x,), impl, "index", x.q).impls
    if x.cu_seqlens is not None:
        token_ids.expect_offsets("cu_seqlens", x.cu_seqlens, x.q.shape[1])
    q, k, *others = (None if y is None else y.detach().contiguous() for y in x[:5])
    options = dict(zip(Indexing._fields[5:], x[5:]))
    return _index(q, k, *others, **options, topk=topk, local=local, impl=impl)


def eager(x: Indexing, topk: int, local: int) -> Tensor:
    """int32 [B, T, groups, topk]"""
    B, T, HI = x.q.shape[:3]
    out = torch.full((B * T, x.groups, topk), -1, dtype=torch.int32, device=x.q.device)
    q, k, weights = flat(x)
    for t, at, seen in in_tiles(x, HI * x.k.shape[1]):
        rows, entries = slice(t.row, t.row + t.rows), slice(t.key, t.key + t.entries)
        scores = scores_of(x, q[rows], k[entries], None if weights is None else weights[rows])
        if not x.pooled:
            later = torch.arange(t.entries, device=q.device) > at[:, None]
            scores = scores.masked_fill(later, -torch.inf)
            scores = F.pad(scores, (0, -t.entries % x.block), value=-torch.inf)
            scores = scores.unflatten(-1, (-1, x.block)).amax(-1)
        out[rows] = best(scores, seen, topk, local).transpose(0, 1)
    return out.view(B, T, x.groups, topk)


def scores_of(x: Indexing, q: Tensor, k: Tensor, weights: Tensor | None = None) -> Tensor:
    """[groups, rows, S] of a tile's q [rows, HI, D], k [S, D] and weights [rows, HI]."""
    return by_list(x, q.transpose(0, 1) @ k.mT, weights)


def by_list(x: Indexing, products: Tensor, weights: Tensor | None) -> Tensor:
    """[groups, rows, S] of the products [HI, rows, S] of q and k, and weights [rows, HI]."""
    scores = products.relu() if x.relu else products
    if weights is not None:
        scores = scores * weights.mT[..., None]
    return scores.unflatten(0, (x.groups, -1)).sum(1)


def best(scores: Tensor, seen: Tensor, topk: int, local: int) -> Tensor:
    """int32 [groups, rows, topk]: of each row the best of its first seen [rows] entries, ascending,
    -1 behind them; of equal ones the earlier. The last `local` of them are always taken."""
    entries = torch.arange(scores.shape[-1], device=scores.device)
    is_seen, largest = entries < seen[:, None], torch.finfo(scores.dtype).max
    scores = scores.nan_to_num(-largest, largest, -largest)
    scores = scores.masked_fill(is_seen & (entries >= seen[:, None] - local), torch.inf)
    scores = scores.masked_fill(~is_seen, -torch.inf)
    found = scores.new_full((*scores.shape[:-1], topk + 1), -1, dtype=torch.int32)
    count = min(topk, scores.shape[-1])
    if count:
        threshold = scores.topk(count).values[..., -1:]
        above, level = scores > threshold, scores == threshold
        missing = count - above.sum(-1, keepdim=True)
        taken = is_seen & (above | (level & (level.cumsum(-1) <= missing)))
        place = torch.where(taken, taken.cumsum(-1) - 1, topk)
        found.scatter_(-1, place, entries.int().expand_as(place))
    return found[..., :topk]


def unsupported_reason(x: Indexing) -> str | None:
    """Why the kernels can't take a call, or None if they can."""
    if not 0 < x.q.shape[-1] <= 256:
        return "heads have more than 256 features, or none"
    if x.q.dtype == torch.float64:
        return "it computes in float32, and q is float64"
    if max(x.k.shape[0] * x.k.shape[1], x.q.shape[0] * x.q.shape[1]) >= 2**31:
        return "it counts tokens in 32 bits"
    return None


def _kind(x: Indexing) -> KernelKey:
    dtypes = x.q.dtype, x.k.dtype, x.weights is not None and x.weights.dtype
    block = 1 if x.pooled else x.block
    return ("indexer", *dtypes, x.q.shape[-1], block, x.relu and "relu")


def _at_sizes(args: tuple) -> list[tuple]:
    """Each tile of queries beside each power of two of columns (triton_kernels.py: select)."""
    x, found, new = Indexing(*args[:10]), [], compile_ahead.resized
    for n in range(36):
        k = new(x.k, 1, (1 if x.pooled else x.block) << (4 + n // 3))
        q, weights = (new(y, 1, (1, 64, 128)[n % 3]) for y in (x.q, x.weights))
        given = q, k, weights, new(x.cu_seqlens, 2), new(x.key_lengths, 1)
        found.append((*given, *args[5:]))
    return found


_index = custom_op.KernelOp(
    "index",
    f"({custom_op.schema_of(Indexing)}, int topk, int local, str impl) -> Tensor",
    fake=lambda q, *args: q.new_empty((*q.shape[:2], args[5], args[9]), dtype=torch.int32),
    kernel="slipstream.kernels.indexer.triton_kernels:select",
    plain=eager,
    kind=_kind,
    packed={"x": Indexing},
    # more blocks than are listed
    probe={
        "q": (1, 150, ...),
        "k": lambda k: torch.randn(1, 150, k.shape[-1], device=k.device).to(k.dtype),
        "weights": (1, 150, ...),
        "cu_seqlens": None,
        "key_lengths": None,
        "topk": 5,
        "local": 1,
    },
    at_sizes=_at_sizes,
)
_CANDIDATES = _index.candidates(unsupported_reason)
