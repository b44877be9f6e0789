"""Which keys a query sees, as transformers' mask interface gives it to every layer of a model.

transformers describes a mask by a function of (batch, head, query, key). `build_mask` reads that
function, and the padding, into an int32 tensor whose shape carries what the host has to know:

    None             every query sees every key
    [1, V, 1, 0]     every key is real; the last query stands on the last key
    [B, V, 1, 1]     the number of keys in use, the first ones; the last query stands on the last
    [B, V, 1, 2]     the first key in use and the one past the last, as above
    [1, V, N+1, X]   offsets of N sequences, with the B rows one behind the other; X is 1, or 2
                     where the mask cuts rows at fixed places (chunks)

V is the rule, causal and window. Shapes alone say it, so nothing waits for the device; and no model
has enough heads for this tensor to be mistaken for a mask of scores. Every other mask is dense and
bool.
"""

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from slipstream.integrations import linear_mixers
from slipstream.runtime.consistent import consistent_scope

# above any number of heads, so that adding such a mask to scores is an error
FIRST_RULE = 4099
FEW_KEYS = 2**22  # numbers in them


class Rule(NamedTuple):
    """How many keys before and after its own position a query sees; -1 is without bound."""

    left: int = -1
    right: int = -1

    @property
    def positioned(self) -> bool:
        """Whether it matters on which key a query stands."""
        return self.left >= 0 or self.right >= 0

    @property
    def writable(self) -> bool:
        return self.right == 0 or self.left == self.right

    @property
    def size(self) -> int:
        """The size of dimension 1 that stands for it."""
        return FIRST_RULE + 2 * (self.left + 1) + int(self.right == 0)

    @classmethod
    def of_size(cls, size: int) -> "Rule":
        left, causal = divmod(size - FIRST_RULE, 2)
        return cls(left - 1, 0 if causal else left - 1)


class Pattern(NamedTuple):
    """The parts of a mask function. cuts: rows fall into sequences that do not see each other;
    chunks: some of the cuts are at multiples of a size, counted from the start of the row."""

    rule: Rule = Rule()
    cuts: bool = False
    chunks: bool = False

    def __and__(self, other: "Pattern") -> "Pattern":
        bounds = zip(self.rule, other.rule)
        rule = Rule(*(max(x, y) if min(x, y) < 0 else min(x, y) for x, y in bounds))
        return Pattern(rule, self.cuts or other.cuts, self.chunks or other.chunks)


def is_rule_mask(mask: Tensor) -> bool:
    """Whether build_mask made it, and it is not dense."""
    return mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[1] >= FIRST_RULE


class Query(NamedTuple):
    """The arguments of transformers' mask interface that a mask depends on."""

    batch: int
    queries: int
    keys: int
    q_offset: int | Tensor  # the position of query 0; on a device if the cache is static
    k_offset: int  # the position of key 0
    padding: Tensor | None  # bool [B, up to keys], False where there is padding
    device: torch.device | str

    @property
    def aligned(self) -> bool:
        """Whether query t stands on key t, for all of them."""
        same = isinstance(self.q_offset, int) and self.q_offset == self.k_offset
        return same and self.queries == self.keys

    @property
    def stand(self) -> int | Tensor:
        """The number of keys up to the one on which the last query stands."""
        return self.q_offset + self.queries - self.k_offset


def build_mask(pattern: Pattern, mask_function: Callable, call: Query) -> Tensor | bool | None:
    """The mask as this file's head describes it; False if it has to be dense."""
    rule = pattern.rule
    if not rule.writable or (call.keys == 1 and call.padding is not None):
        return False
    padding = None if call.padding is None or _all_real(call) else call.padding
    call = call._replace(padding=padding)
    if pattern.cuts:
        return call.aligned and padding is None and _cut(pattern, mask_function, call)
    if not rule.positioned:
        return _keys_in_use(rule, call)
    if call.aligned:
        return _aligned(rule, call)
    return rule.right == 0 and _on_cache(rule, call)


def _all_real(call: Query) -> bool:
    """Whether no key is padding; not known where the host cannot wait for it."""
    assert call.padding is not None
    if linear_mixers.is_unreadable(call.padding) or call.padding.shape[1] < call.keys:
        return False
    return bool(call.padding.all())


def _shaped(rule: Rule, numbers: Tensor) -> Tensor:
    """[B or 1, 1, X, Y] -> [B or 1, V, X, Y]"""
    return numbers.int().expand(-1, rule.size, -1, -1)


def _whole(rule: Rule, device: torch.device | str) -> Tensor:
    return _shaped(rule, torch.empty(1, 1, 1, 0, dtype=torch.int32, device=device))


def _counts(rule: Rule, end: Tensor) -> Tensor:
    return _shaped(rule, end[:, None, None, None])


def _ranges(rule: Rule, begin: Tensor, end: Tensor) -> Tensor:
    return _shaped(rule, torch.stack([begin, end], 1)[:, None, None, :])


def _bounds(padding: Tensor) -> tuple[Tensor, Tensor]:
    """The first real token of a row and the one past the last, [B] each; 0, 0 without any."""
    real = padding.int()
    begin = real.argmax(1)
    end = (real.shape[1] - real.flip(1).argmax(1)) * real.amax(1)
    return begin, end


def _keys_in_use(rule: Rule, call: Query) -> Tensor | bool | None:
    """Without causal or window: the same keys for every query of a row."""
    if call.padding is None:
        return None
    begin, end = _bounds(call.padding)
    if linear_mixers.is_unreadable(begin):
        return _ranges(rule, begin, end)
    regular = (call.padding.sum(1) == end - begin).all()
    regular, at_start = torch.stack([regular, (begin == 0).all()]).tolist()
    if not regular:
        return False
    return _counts(rule, end) if at_start else _ranges(rule, begin, end)


def _aligned(rule: Rule, call: Query) -> Tensor | bool:
    """Query t on key t: a padded row is three sequences, padding, what is real, and the rest."""
    if call.padding is None:
        return _whole(rule, call.device)
    begin, end = _bounds(call.padding)
    regular = (call.padding.sum(1) == end - begin).all()
    if not linear_mixers.is_unreadable(regular) and not bool(regular):
        return False
    row = torch.arange(call.batch, device=begin.device)[:, None] * call.keys
    cuts = torch.stack([begin, end, torch.full_like(begin, call.keys)], 1) + row
    offsets = torch.cat([cuts.new_zeros(1), cuts.flatten()])
    return _shaped(rule, offsets[None, None, :, None])


def _on_cache(rule: Rule, call: Query) -> Tensor | bool:
    """Causal: the last query stands on key `stand` - 1, or on padding there."""
    stand, keys = call.stand, call.keys
    exact = isinstance(stand, int)
    if exact and not 0 < stand <= keys:
        return False
    last = torch.as_tensor(stand, dtype=torch.int32, device=call.device).expand(call.batch)
    whole = _whole(rule, call.device) if exact and stand == keys else _counts(rule, last)
    if call.padding is None:
        return whole
    begin = call.padding.int().argmax(1)
    if linear_mixers.is_unreadable(begin):
        return _ranges(rule, begin, last)
    # what the padding is too short for is padding
    token = torch.arange(call.padding.shape[1], device=begin.device)
    real = (call.padding & (token < last[:, None])).sum(1)
    regular = ((real == last - begin) | (real == 0)).all()
    regular, all_real = torch.stack([regular, (real == last).all()]).tolist()
    if not regular:
        return False
    return whole if all_real else _ranges(rule, begin, last)


def _cut(pattern: Pattern, mask_function: Callable, call: Query) -> Tensor:
    """Sequences begin at tokens that do not see the one before them."""
    batch, tokens = call.batch, call.keys
    row = torch.arange(batch, device=call.device)[:, None]
    token = torch.arange(1, tokens, device=call.device)[None]
    begins = ~mask_function(row, row * 0, token, token - 1).expand(batch, tokens - 1)
    begins = torch.cat([begins.new_ones(batch, 1), begins], 1).flatten()
    offsets = linear_mixers.offsets_of_starts(begins)
    known = not linear_mixers.is_unreadable(begins)
    if known and offsets.shape[0] == batch + 1 and not pattern.chunks:
        return _whole(pattern.rule, call.device)
    offsets = offsets[None, None, :, None].expand(-1, -1, -1, 2 if pattern.chunks else 1)
    return _shaped(pattern.rule, offsets)


# transformers' mask functions with a parameter are closures: they are known by their code
_UNUSED = torch.empty(0, device="cpu")
_SLIDING = masking_utils.sliding_window_overlay(1).__code__
_SLIDING_BOTH = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_CHUNKED = masking_utils.chunked_overlay(1, _UNUSED).__code__
_PACKED = masking_utils.packed_sequence_mask_function(_UNUSED).__code__
_AND = masking_utils.and_masks().__code__
# not in every release that we take
_remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
_REMAPPED = _remap and _remap(masking_utils.causal_mask_function, _UNUSED).__code__
_KNOWN = (_SLIDING, _SLIDING_BOTH, _CHUNKED, _PACKED, _AND, _REMAPPED)


def pattern_of(mask_function: Callable) -> Pattern | None:
    """The parts of transformers' mask function; None if any of them is not transformers' own."""
    if mask_function is masking_utils.causal_mask_function:
        return Pattern(Rule(right=0))
    if mask_function is masking_utils.bidirectional_mask_function:
        return Pattern()
    code: Any = getattr(mask_function, "__code__", None)
    if code not in _KNOWN or code is None:
        return None
    cells = [x.cell_contents for x in mask_function.__closure__ or ()]
    inside = dict(zip(code.co_freevars, cells))
    if code is _SLIDING:
        return Pattern(Rule(left=inside["sliding_window"] - 1))
    if code is _SLIDING_BOTH:
        return Pattern(Rule(inside["sliding_window"], inside["sliding_window"]))
    if code is _CHUNKED:
        return Pattern(cuts=True, chunks=True)
    if code is _PACKED:
        return Pattern(cuts=True)
    if code is _REMAPPED:
        # positions start at 0 in every sequence, and chunks with them
        inner = pattern_of(inside["mask_function"])
        return None if inner is None else inner._replace(cuts=True, chunks=False)
    found = Pattern()
    for each in inside["mask_functions"]:
        pattern = pattern_of(each)
        if pattern is None:
            return None
        found &= pattern
    return found


def traced_pattern_of(
    mask_function: Callable, local_size: int | None, config: Any, bidirectional: bool, causal: bool
) -> Pattern | None:
    """The same while torch.compile traces, which cannot read closures.

    transformers passes the window beside the function.

    Args:
        bidirectional, causal: whether the caller allows to skip a mask of that kind, which it does
            not where rows are packed.
    """
    if mask_function is masking_utils.causal_mask_function:
        return Pattern(Rule(right=0))
    if mask_function is masking_utils.bidirectional_mask_function:
        return Pattern()
    if getattr(mask_function, "__code__", None) is not _AND or _has_blocks(type(config).__module__):
        return None
    if bidirectional:
        return None if local_size is None else Pattern(Rule(local_size, local_size))
    if local_size is None:
        return Pattern(Rule(right=0), cuts=True)
    if local_size == getattr(config, "attention_chunk_size", None):
        # packed or not is unknown here, so that offsets beside it are refused
        return Pattern(Rule(right=0), cuts=True, chunks=True)
    return Pattern(Rule(local_size - 1, 0), cuts=not causal)


@torch._dynamo.assume_constant_result
def _has_blocks(config_module: str) -> bool:
    """Whether the models of a configuration let blocks of tokens see each other."""
    return "block_sequence_ids" in modeling_source(config_module)


@torch._dynamo.assume_constant_result
def wants_entries(config_module: str) -> bool:
    """Whether the models of a configuration always want to compute with the entries of a mask."""
    return any(f"causal_skip{x}False" in modeling_source(config_module) for x in ("=", '": '))


def indexed(config_module: str) -> bool:
    """Whether attention of a configuration's models, which computes with the entries of a mask, is
    replaced by patch() with one that does not."""
    module = sys.modules.get(config_module.replace(".configuration_", ".modeling_"))
    names = "DeepseekV32Attention", "GlmMoeDsaAttention"
    found = [vars(module).get(x) for x in names] if module is not None else []
    return any(hasattr(x.forward, "slipstream_original") for x in found if x is not None)


@cache
def modeling_source(config_module: str) -> str:
    """The source of the models beside a configuration; "" if there is none."""
    name = config_module.replace(".configuration_", ".modeling_")
    module = sys.modules.get(name)
    try:
        return "" if module is None else inspect.getsource(module)
    except (OSError, TypeError):  # no file: an interactive session, or a builtin
        return ""


def cuts_by_position(mask: Tensor | None, positions: Any, q: Tensor, k: Tensor) -> Tensor | None:
    """Offsets of the sequences that position_ids describe, with rows one after the other, under a
    causal mask. transformers' masks do not read positions beside a cache or padding, and some
    models do not pass them to the mask. The offsets are stored on the mask: every layer asks."""
    if mask is None or not is_rule_mask(mask) or Rule.of_size(mask.shape[1]).right != 0:
        return None
    (B, _, T, _), (places, numbers) = q.shape, mask.shape[2:]
    in_use = places == 1 and numbers > 0  # of a static cache, say
    if k.shape[2] != T or in_use or torch.compiler.is_compiling():
        return None
    known = getattr(mask, "slipstream_cuts", None)
    if known is None or known[0] is not positions:
        known = positions, _cuts_by_position(mask, positions, B, T)
        mask.slipstream_cuts = known  # pyright: ignore[reportAttributeAccessIssue]
    return known[1]


def _cuts_by_position(mask: Tensor, positions: Any, B: int, T: int) -> Tensor | None:
    real = None
    if mask.shape[2] == 3 * B + 1:  # of _aligned
        begin, end = mask[0, 0, :-1, 0].view(B, 3, 1)[:, 1:].unbind(1)
        token = torch.arange(B * T, device=mask.device).view(B, T)
        real = (token >= begin) & (token < end)
    seq_idx = linear_mixers.sequences_of_positions(positions, real)
    if seq_idx is None or seq_idx.shape[1] != T:
        return None
    return linear_mixers.offsets_of(seq_idx.expand(B, -1)).int()


def sees_few_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether each row has one query, which sees all keys, so few that torch's own attention is as
    fast as ours: it keeps the host less busy."""
    (B, _, S, D), few = k.shape, 0 < k.numel() <= FEW_KEYS
    if not few or q.shape[2] != 1 or q.shape[0] != B or v.shape[3] != D or D > 256:
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or consistent_scope.on:
        return False
    whole = mask is None or (is_rule_mask(mask) and mask.shape[2:] == (1, 0))
    return whole and (mask is None or not 0 <= Rule.of_size(mask.shape[1]).left < S - 1)


def visible(mask: Tensor, batch: int, queries: int, keys: int) -> Tensor:
    """The dense bool [B or 1, 1, T, S] of a mask that build_mask made."""
    rule, device = Rule.of_size(mask.shape[1]), mask.device
    q = torch.arange(queries, device=device)[:, None] + (keys - queries)
    k = torch.arange(keys, device=device)
    seen = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
    if mask.shape[2] > 1:
        token = torch.arange(batch * keys, device=device, dtype=torch.int32)
        sequence = torch.searchsorted(mask[0, 0, 1:, 0].contiguous(), token, right=True)
        sequence = sequence.view(batch, 1, keys)
        seen = sequence[..., :, None] == sequence[..., None, :]
    elif mask.shape[3]:
        numbers = mask[:, :1, :, :, None]  # [B, 1, 1, X, 1]
        end = numbers[..., -1, :]
        q = q - keys + end
        seen = (k < end) & (k >= (numbers[..., 0, :] if mask.shape[3] == 2 else 0))
        seen = seen.expand(-1, -1, queries, -1)
    if rule.left >= 0:
        seen = seen & (k >= q - rule.left)
    if rule.right >= 0:
        seen = seen & (k <= q + rule.right)
    return seen
