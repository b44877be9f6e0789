"""Attention to selected keys: what a call is given, its checks, and what a query sees.

A query sees the keys of the blocks in its list, with `tail` of the block open at it, and of a
window beside them; under causal none that is later. Each once, however often it is named.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.common import checks, key_blocks
from slipstream.compiler.compiler_state import KernelKey
from slipstream.kernels.attention import inputs as dense
from slipstream.kernels.attention import reference
from slipstream.runtime import backends, consistent, token_ids
from slipstream.runtime.context_parallel import ContextParallel


class SelectedBy(NamedTuple):
    """What ops.attention is asked for beside the arguments of dense attention."""

    selected: Tensor | None
    block: int
    tail: bool
    causal: bool
    window: bool  # whether there is one


class SelectedInputs(NamedTuple):
    """As AttentionInputs, whose letters these are, with lists of G = 1, HKV or H heads."""

    q: Tensor  # [B, T, H, D]
    k: Tensor  # [N or 1, S, HKV, D]
    v: Tensor  # [N or 1, S, HKV, DV]
    selected: Tensor  # int32 [B, T, G, entries]: blocks of the query's sequence; negative is none
    sinks: Tensor | None = None  # [H]
    cu_q: Tensor | None = None  # [N + 1]
    cu_k: Tensor | None = None  # [N + 1]
    lengths: Tensor | None = None  # [N]

    @property
    def sequences(self) -> int:
        return self.dense.sequences

    @property
    def dense(self) -> dense.AttentionInputs:
        q, k, v, _, sinks, cu_q, cu_k, lengths = self
        return dense.AttentionInputs(q, k, v, None, sinks, None, cu_q, cu_k, lengths)


class SelectedOptions(NamedTuple):
    """left, right: the window's sides, beyond every position where it has no bound; there is no
    window if left + right is below 0."""

    scale: float
    left: int
    right: int
    causal: bool
    block: int
    tail: bool


def checked(
    terms: dense.AttentionInputs,
    options: dense.AttentionOptions,
    asked: dense.Asked,
    context: ContextParallel | None,
    by: SelectedBy,
) -> tuple[SelectedInputs, SelectedOptions]:
    """
    Raises:
        ValueError: shapes or the lists' dtype do not fit, or there are no lists.
        NotImplementedError: an option of dense attention that this has not.
    """
    if by.selected is None:
        raise ValueError("selected: want lists beside block or tail, got None")
    same_bits = asked.consistent or consistent.consistent_scope.on
    lacks = {"g": terms.g, "alibi_slopes": terms.slopes, "dropout_p": terms.seed}
    lacks |= {
        "context": context,
        "softcap": options.softcap or None,
        "consistent": same_bits or None,
    }
    for name, x in lacks.items():
        if x is not None:
            raise NotImplementedError(f"{name}: is not implemented with selected")
    if by.block not in key_blocks.SIZES:
        raise ValueError(f"block: want one of {key_blocks.SIZES}, got {by.block}")
    dense.check(terms, options)
    terms = dense.with_autocast(terms)
    (B, T, H, _), HKV, selected = terms.q.shape, terms.k.shape[2], by.selected
    checks.expect_rank("selected", selected, 4, "[B, T, G, N]")
    G = selected.shape[2]
    if G not in (1, HKV, H):
        raise ValueError(f"selected: want lists of 1, {HKV} or {H} heads, got {G}")
    checks.expect_shape("selected", selected, (B, T, G, selected.shape[3]))
    if selected.dtype != torch.int32:
        raise ValueError(f"selected: want int32, got {selected.dtype}")
    checks.expect_one_device({"q": terms.q, "selected": selected})
    left, right = -1, 0
    if by.window and not asked.nothing:
        left, right = (1 << 30 if side < 0 else min(side, 1 << 30) for side in options[1:3])
    how = SelectedOptions(options.scale, left, right, by.causal, int(by.block), bool(by.tail))
    packed = terms.cu_q, terms.cu_k, terms.lengths
    return SelectedInputs(*terms[:3], selected, terms.sinks, *packed), how


def takes_sm90(inputs: SelectedInputs, options: SelectedOptions) -> bool:
    """Whether the kernel for sm_90 has the forward of a call: heads of 64 or 128, with a list a
    power of two of them from 8 to 64, and large blocks alone, of sequences of one length."""
    q, k, v = inputs[:3]
    R, left = divmod(q.shape[2], max(k.shape[2], inputs.selected.shape[2]))
    return (
        q.shape[3] == v.shape[3] in (64, 128)
        and R in (8, 16, 32, 64)
        and left == 0
        and options.block in (64, 128)
        and not options.tail
        and options.left + options.right < 0
        and all(x is None for x in inputs[5:])
        and k.shape[0] == q.shape[0]
        and q.dtype in (torch.float16, torch.bfloat16)
        and backends.sm90_unsupported(q) is None
    )


def sm90_kind(inputs: SelectedInputs, options: SelectedOptions) -> KernelKey:
    """The calls of that kernel that share a verdict on it."""
    R = inputs.q.shape[2] // max(inputs.k.shape[2], inputs.selected.shape[2])
    sizes = inputs.q.dtype, inputs.q.shape[3], options.block, R
    return ("selected_attention.sm90", *sizes, inputs.sinks is not None and "sinks")


def check_values(inputs: SelectedInputs, options: SelectedOptions) -> None:
    blocks = -(-inputs.k.shape[1] // options.block)
    token_ids.expect_below("selected", inputs.selected, blocks, "blocks of keys")
    if torch.compiler.is_compiling() or inputs.cu_q is None:
        return
    token_ids.expect_offsets("cu_seqlens", inputs.cu_q, inputs.q.shape[1])
    if inputs.cu_k is not None and inputs.cu_k is not inputs.cu_q:
        token_ids.expect_offsets("cu_seqlens_k", inputs.cu_k, inputs.k.shape[1])


def visible(
    where: reference.Positions, selected: Tensor, keys: int, options: SelectedOptions
) -> Tensor:
    """[B, T, G, S]: which keys the queries of these lists see, of `keys` in a sequence's row."""
    block, (B, T, G, _) = options.block, selected.shape
    blocks = -(-keys // block)
    # those that are none are marked in a column of their own
    at = torch.where((selected < 0) | (selected >= blocks), blocks, selected).long()
    marked = selected.new_zeros(B, T, G, blocks + 1, dtype=torch.bool).scatter_(3, at, True)
    marked[..., blocks] = False
    of_key = where.k_position // block
    seen = marked.gather(3, of_key[:, None, None].expand(B, T, G, -1))
    age = reference.distance(where)[:, :, None]
    if options.tail:
        open_block = (where.q_position + 1).div(block, rounding_mode="floor")
        seen = seen | ((open_block[:, :, None, None] == of_key[:, None, None]) & (age >= 0))
    if options.causal:
        seen = seen & (age >= 0)
    if options.left + options.right >= 0:
        seen = seen | ((age <= options.left) & (age >= -options.right))
    return seen & (where.q_sequence[:, :, None, None] == where.k_sequence[:, None, None])
