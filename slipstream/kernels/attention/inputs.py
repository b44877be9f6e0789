"""The inputs of softmax attention (reference.py has the formula, MATH.md the rest)."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.common import checks

# a gate below this is this: the exponential is 0 in float64 already
MIN_GATE = -1e4


class AttentionInputs(NamedTuple):
    """B batch, T queries, S keys, H heads of q, HKV of k and v, N sequences.

    Queries are [B, T] with N = B, or packed [1, T] by cu_q; keys [N, S], or packed [1, S] by cu_k.
    """

    q: Tensor  # [B, T, H, D]
    k: Tensor  # [N or 1, S, HKV, D]
    v: Tensor  # [N or 1, S, HKV, DV]
    g: Tensor | None = None  # [N or 1, S, H], log of what a token forgets; only with right = 0
    sinks: Tensor | None = None  # [H]
    slopes: Tensor | None = None  # [H] or [N, H]
    cu_q: Tensor | None = None  # [N + 1]
    cu_k: Tensor | None = None  # [N + 1]
    lengths: Tensor | None = None  # [N], how many of its keys a sequence uses, the first ones
    seed: Tensor | None = None  # int64 [1], of the dropout

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_q is None else self.cu_q.shape[0] - 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the arithmetic."""
        return checks.wide_dtype(self.q)

    @property
    def simple(self) -> bool:
        """Nothing but q, k and v."""
        packed = self.cu_q is not None or self.cu_k is not None or self.lengths is not None
        return not packed and self.seed is None and not self.biased

    @property
    def biased(self) -> bool:
        return self.g is not None or self.sinks is not None or self.slopes is not None


class AttentionOptions(NamedTuple):
    """left, right: how far a query sees, -1 without bound. softcap: 0 for none.

    dropout: the probability with which a weight is dropped; the inputs have a seed beside it.
    """

    scale: float
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    dropout: float = 0.0


# by whose name gradients are returned, in the order of AttentionInputs
DIFFERENTIABLE = ("q", "k", "v", "g", "sinks")
# o, and lse where that is asked for
Results = tuple[Tensor, Tensor | None]


class Asked(NamedTuple):
    """What a call asks for besides.

    Attributes:
        lse: that it is returned.
        nothing: that no query sees a key.
        consistent: the same bits whatever else there is in the call.
    """

    impl: str | None = None
    lse: bool = False
    nothing: bool = False
    consistent: bool = False


def with_autocast(inputs: AttentionInputs) -> AttentionInputs:
    """With q, k and v in the dtype that autocast has for q's device, if it is on."""
    dtype = checks.autocast_dtype(inputs.q)
    if dtype is None:
        return inputs
    q, k, v = (x.to(dtype) for x in inputs[:3])
    return inputs._replace(q=q, k=k, v=v)


def in_compute_dtype(inputs: AttentionInputs) -> AttentionInputs:
    floating = {
        n: x for n, x in inputs._asdict().items() if x is not None and x.is_floating_point()
    }
    return inputs._replace(**{name: x.to(inputs.dtype) for name, x in floating.items()})


def check(inputs: AttentionInputs, options: AttentionOptions) -> None:
    """ValueError or TypeError, under the names of ops.attention, for tensors that do not fit.

    Once for each signature (run.py's key): a check of what that lacks would be skipped in later
    calls.
    """
    q, k, v, g, sinks, slopes, cu_q, cu_k, lengths, _ = inputs
    checks.expect_rank("q", q, 4, "[B, T, H, D]")
    checks.expect_rank("k", k, 4, "[B, S, HKV, D]")
    checks.expect_rank("v", v, 4, "[B, S, HKV, DV]")
    _check_packed(inputs)
    B, T, H, D = q.shape
    rows, keys = B, k.shape[1]
    if cu_q is not None:
        rows = 1 if cu_k is not None else inputs.sequences
        keys = T if cu_k is cu_q else keys
    checks.expect_shape("k", k, (rows, keys, k.shape[2], D))
    checks.expect_shape("v", v, (rows, keys, k.shape[2], v.shape[3]))
    checks.expect_multiple("heads of q", H, "heads of k", k.shape[2])
    floating = {"q": q, "k": k, "v": v, "g": g, "sinks": sinks, "alibi_slopes": slopes}
    checks.expect_floating(floating)
    whole = {"cu_seqlens": cu_q, "cu_seqlens_k": cu_k, "key_lengths": lengths}
    checks.expect_one_device(floating | whole)
    if checks.autocast_dtype(q) is None:
        checks.expect_one_dtype({"q": q, "k": k, "v": v})
    if g is not None:
        checks.expect_shape("g", g, (*k.shape[:2], H))
        if options.right != 0:
            raise ValueError("g: want causal=True beside a forgetting gate, got causal=False")
    if sinks is not None:
        checks.expect_shape("sinks", sinks, (H,))
    check_slopes(slopes, H, inputs.sequences)


def _check_packed(inputs: AttentionInputs) -> None:
    """The tensors of integers."""
    cu_q, cu_k, lengths = inputs.cu_q, inputs.cu_k, inputs.lengths
    if cu_k is not None:
        if cu_q is None:
            raise ValueError("cu_seqlens_k: wants packed queries, cu_seqlens, beside it; got None")
        checks.expect_cu_seqlens(cu_k, *inputs.k.shape[:2])
        checks.expect_shape("cu_seqlens_k", cu_k, cu_q.shape)
    if cu_q is not None:
        checks.expect_cu_seqlens(cu_q, *inputs.q.shape[:2])
    checks.expect_index("key_lengths", lengths, (inputs.sequences,))


def check_slopes(slopes: Tensor | None, heads: int, sequences: int) -> None:
    if slopes is not None and tuple(slopes.shape) != (heads,):
        checks.expect_shape("alibi_slopes", slopes, (sequences, heads))


# batch and rows of q, batch and rows of k
Slices = tuple[slice, slice, slice, slice]


def each_sequence(inputs: AttentionInputs) -> Iterator[tuple[AttentionInputs, Slices]]:
    """The inputs of each sequence alone, and where it lies. Reads the offsets."""
    (q, k, v, g, sinks, slopes), T, S = inputs[:6], inputs.q.shape[1], inputs.k.shape[1]
    q_of = None if inputs.cu_q is None else inputs.cu_q.tolist()
    k_of = None if inputs.cu_k is None else inputs.cu_k.tolist()
    used = None if inputs.lengths is None else inputs.lengths.tolist()
    for n in range(inputs.sequences):
        rows = _rows(n, q_of, T, None)
        keys = _rows(n, k_of, S, None if used is None else used[n])
        head_slopes = slopes if slopes is None or slopes.dim() == 1 else slopes[n : n + 1]
        gates = None if g is None else g[keys]
        yield AttentionInputs(q[rows], k[keys], v[keys], gates, sinks, head_slopes), (*rows, *keys)


def _rows(n: int, offsets: list[int] | None, rows: int, used: int | None) -> tuple[slice, slice]:
    batch = slice(n, n + 1) if offsets is None else slice(0, 1)
    begin, end = (0, rows) if offsets is None else (offsets[n], offsets[n + 1])
    if used is not None:
        end = min(end, begin + max(used, 0))
    return batch, slice(begin, end)
