"""Models with consistent=True: equal bits whatever the batch, the cut and the step.

A sequence is cut into blocks of 64 tokens. A cache has the state after the last whole block, and of
the tokens since then what the embedding gave, and the next call runs these again together with its
own. So every token is computed within its block, from the state before the block, whether it comes
in training, in a prompt, in a piece of one or alone.

On a CPU each block of each sequence is a call of the layers, padded with zeros to 64 tokens, so
that every call of torch has one shape. On CUDA the kernels round alike at every size
(nn/consistent.py, runtime/consistent.py): whole blocks of all sequences are one call, and the
tokens after them another.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.layers import Mixer
from slipstream.nn.consistent import linear, use_consistent_products
from slipstream.nn.linear import plain_linear
from slipstream.runtime.consistent import BLOCK

# Up to this many tokens, layers compute in other forms, unless gradients are wanted.
FEW_TOKENS = 16

State = dict[str, Tensor]


class LayerStates:
    """A layer's states, as SlipstreamModel._run takes them. A call reads `before` and writes
    `after`."""

    def __init__(self, before: State | None = None) -> None:
        self.before, self.after = before, None
        self.token_states: tuple[str, ...] = ()

    @property
    def is_initialized(self) -> bool:
        return self.before is not None

    def wide(self, dtype: torch.dtype) -> State:
        assert self.before is not None
        return self.before

    def write(self, state: State, mixer: Mixer) -> bool:
        self.after: State | None = state
        self.token_states = mixer.token_states
        return False


class ModelStates:
    """The states of all layers for some sequences; _run takes it in the place of a StateCache."""

    def __init__(self, layers: list[LayerStates]) -> None:
        self.layers, self.graphs = layers, {}


class Row(NamedTuple):
    """A sequence in a cache.

    states: of the layers, [1, ...], after `blocks` whole blocks; None if there are none.
    h, positions: of the tokens after these, [1, c, D], as the embedding gave them, and [1, c].
    earlier: the sequence before its last whole blocks ran, for `crop`.
    """

    states: tuple[State, ...] | None
    h: Tensor
    positions: Tensor
    blocks: int = 0
    earlier: Any = None

    @staticmethod
    def empty(h: Tensor) -> "Row":
        return Row(None, h[:1, :0], torch.empty(1, 0, dtype=torch.int64, device=h.device))

    def with_tokens(self, h: Tensor, positions: Tensor | None) -> "Row":
        if positions is None:
            begin = self.blocks * BLOCK + self.h.shape[1]
            positions = torch.arange(begin, begin + h.shape[1], device=h.device)[None]
        together = torch.cat([self.positions, positions.to(self.positions.dtype)], 1)
        return self._replace(h=torch.cat([self.h, h], 1), positions=together)

    @property
    def length(self) -> int:
        return self.blocks * BLOCK + self.h.shape[1]

    def after(self, before: "Row", keep: bool) -> "Row":
        """This row with what it was before a call, if `keep`: `crop` goes back to that."""
        if self.blocks == before.blocks:
            return self
        return self._replace(earlier=before._replace(earlier=None) if keep else None)

    def without(self, count: int) -> "Row":
        """Returns the row without its last tokens.

        Raises:
            ValueError: the state from which the tokens that stay would be run again is gone.
        """
        keep, row = self.length - count, self
        if keep < row.blocks * BLOCK and row.earlier is not None:
            row = row.earlier
        rest = keep - row.blocks * BLOCK
        if rest < 0:
            raise ValueError(
                f"crop: want at least {row.blocks * BLOCK} tokens to stay, whose states are the "
                f"oldest that there are, got {keep}"
            )
        return row._replace(h=row.h[:, :rest], positions=row.positions[:, :rest])

    def bytes(self) -> int:
        earlier = 0 if self.earlier is None else self.earlier.bytes()
        tensors = [self.h, self.positions, *(x for s in self.states or () for x in s.values())]
        return earlier + sum(x.numel() * x.element_size() for x in tensors)


def prepare(model: Any) -> None:
    """Prepares a new SlipstreamModel with consistent=True."""
    if model.config.consistent:
        use_consistent_products(model)


def logits_of(model: Any, h: Tensor) -> Tensor:
    """A head with an adapter, hook or wrapper is called as it is, of all rows."""
    head = model.lm_head
    h = head_input(head, h)
    if model.config.consistent and plain_linear(head):
        return linear(h, head.weight, head.bias)
    return head(h)


def head_input(head: Any, h: Tensor) -> Tensor:
    """h, widen for a plain head in float32 of a model in 16 bits."""
    wide = h.dtype.itemsize == 2 and plain_linear(head) and head.weight.dtype == torch.float32
    return h.float() if wide else h


def run(
    model: Any,
    h: Tensor,
    cu_seqlens: Tensor | None,
    cache: Any,
    positions: Tensor | None,
    context: Any = None,
    hidden_states: bool = False,
) -> Tensor:
    """Does what SlipstreamModel._run does, from the rows in cache.open_rows, which it replaces. It
    applies the norm of the embedding, and waits for the offsets.

    Raises:
        NotImplementedError: with a context, hidden_states or a cache in 8 bits.
    """
    if context is not None or hidden_states:
        name = "output_hidden_states" if context is None else "context"
        raise NotImplementedError(f"{name}: is not implemented for a consistent model")
    if cu_seqlens is None:
        parts = list(h.split(1))
        places = [None] * len(parts)
        if positions is not None:
            places = list(positions.expand(h.shape[0], -1).split(1))
    else:
        ends = list(pairwise(cu_seqlens.tolist()))
        parts = [h[:, begin:end] for begin, end in ends]
        places = [None if positions is None else positions[:, begin:end] for begin, end in ends]
    if cache is not None and cache.key_dtype is not None:
        raise NotImplementedError("key_dtype: want None for a consistent model")
    rows = (None if cache is None else cache.open_rows) or [Row.empty(h)] * len(parts)
    if len(rows) != len(parts):
        raise ValueError(f"cache: want {len(rows)} sequences as before, got {len(parts)}")
    new = [x.shape[1] for x in parts]
    rows = [row.with_tokens(*given) for row, given in zip(rows, zip(parts, places))]
    if runs_kernels(h.device):
        outputs, after = _together(model, rows, cache is not None)
    else:
        pairs = [_by_blocks(model, row) for row in rows]
        outputs, after = [y for y, _ in pairs], [row for _, row in pairs]
    if cache is not None:
        cache.open_rows = [x.after(row, cache.records) for x, row in zip(after, rows)]
    y = [x[:, x.shape[1] - count :] for x, count in zip(outputs, new)]
    return torch.cat(y, 0 if cu_seqlens is None else 1)


def runs_kernels(device: torch.device) -> bool:
    """Whether all sequences are one call, rather than each block one."""
    return device.type == "cuda"


def _by_blocks(model: Any, row: Row) -> tuple[Tensor, Row]:
    """The outputs for the tokens of a row, and the row after its whole blocks.

    Raises:
        NotImplementedError: for gradients with checkpointing, whose layers return no states.
    """
    outputs, grad = [], torch.is_grad_enabled()
    if grad and model.gradient_checkpointing and model.training:
        raise NotImplementedError("consistent: gradient checkpointing is not implemented on a CPU")
    for at in range(0, row.h.shape[1], BLOCK):
        block = row.h[:, at : at + BLOCK], row.positions[:, at : at + BLOCK]
        # fused layers round otherwise where no gradient is wanted
        with torch.inference_mode(False), torch.enable_grad(), _keeping_states(model, grad):
            y, states = _run_block(model, row.states, *block)
            if not grad:
                y = y.detach()
                states = tuple({name: x.detach() for name, x in s.items()} for s in states)
        count = block[0].shape[1]
        outputs.append(y[:, :count])
        if count == BLOCK:
            row = row._replace(states=states, blocks=row.blocks + 1)
    whole = row.h.shape[1] // BLOCK * BLOCK
    y = torch.cat(outputs, 1) if outputs else row.h
    return y, row._replace(h=row.h[:, whole:], positions=row.positions[:, whole:])


@contextmanager
def _keeping_states(model: Any, grad: bool) -> Iterator[None]:
    """Within it no layer is checkpointed, unless gradients are wanted: a layer that is returns no
    states."""
    checkpointed = [x for x in model.layers if not grad and x.gradient_checkpointing]
    for block in checkpointed:
        block.gradient_checkpointing = False
    try:
        yield
    finally:
        for block in checkpointed:
            block.gradient_checkpointing = True


def _run_block(
    model: Any, states: tuple[State, ...] | None, h: Tensor, positions: Tensor
) -> tuple[Tensor, tuple[State, ...]]:
    """Runs a block of up to 64 tokens."""
    missing = BLOCK - h.shape[1]
    h = F.pad(h, (0, 0, 0, missing)) if missing else h.clone()
    if not h.requires_grad:
        h.requires_grad_()
    last = positions[:, -1:]
    more = last + 1 + torch.arange(missing, device=positions.device)
    held = ModelStates([LayerStates(x) for x in states or [None] * len(model.layers)])
    together = torch.cat([positions, more], 1)
    y, _ = model._run(normed(model, h), None, held, False, together, None)
    return y, tuple(layer.after or {} for layer in held.layers)


def normed(model: Any, h: Tensor) -> Tensor:
    return h if model.embed_norm is None else model.embed_norm(h)


def _together(model: Any, rows: list[Row], keep: bool) -> tuple[list[Tensor], list[Row]]:
    """Runs _by_blocks for all rows, whole blocks first; keep: whether the rows after are wanted."""
    if not keep:
        y, _ = _call(model, rows, [row.h.shape[1] for row in rows], [0] * len(rows), False)
        return y, rows
    counts = [row.h.shape[1] // BLOCK * BLOCK for row in rows]
    first, after = _call(model, rows, counts, [0] * len(rows), True)
    rest = [
        row._replace(states=states, blocks=row.blocks + count // BLOCK)
        for row, states, count in zip(rows, after, counts)
    ]
    second, _ = _call(model, rest, [x.h.shape[1] - n for x, n in zip(rest, counts)], counts, False)
    cut = [
        row._replace(h=row.h[:, n:], positions=row.positions[:, n:]) for row, n in zip(rest, counts)
    ]
    return [torch.cat(pair, 1) for pair in zip(first, second)], cut


def _call(
    model: Any, rows: list[Row], counts: Sequence[int], begins: Sequence[int], keep: bool
) -> tuple[list[Tensor], list[tuple[State, ...] | None]]:
    """Runs counts[n] tokens of each row n from its token begins[n] on: in one packed call the rows
    that have states, in another those without. Returns each row's outputs, and its states then."""
    outputs, after = [row.h[:, :0] for row in rows], [row.states for row in rows]
    for begun in (True, False):
        which = [n for n, x in enumerate(rows) if counts[n] and (x.states is not None) == begun]
        if not which:
            continue
        cut = [(n, slice(begins[n], begins[n] + counts[n])) for n in which]
        grad, held = torch.is_grad_enabled(), None
        with torch.inference_mode(False):
            offsets = [0, *accumulate(counts[n] for n in which)]
            offsets = torch.tensor(offsets, dtype=torch.int32, device="cpu")
            h = torch.cat([rows[n].h[:, tokens] for n, tokens in cut], 1)
            positions = torch.cat([rows[n].positions[:, tokens] for n, tokens in cut], 1)
            if begun or keep:
                held = ModelStates(_gathered([rows[n].states for n in which], len(model.layers)))
            wanted = grad or h.shape[1] <= FEW_TOKENS
            with torch.set_grad_enabled(wanted), _keeping_states(model, grad):
                y, _ = model._run(
                    normed(model, h), offsets.to(h.device), held, False, positions, None
                )
            y = y if grad else y.detach()
        for n, part in zip(which, y.split([counts[n] for n in which], 1)):
            outputs[n] = part
        if keep and held is not None:
            for i, n in enumerate(which):
                after[n] = tuple(
                    {name: x[i : i + 1] for name, x in (layer.after or {}).items()}
                    for layer in held.layers
                )
    return outputs, after


def _gathered(states: list[tuple[State, ...] | None], layers: int) -> list[LayerStates]:
    """The states of rows as one batch; caches of keys as long as the longest."""
    given = [x for x in states if x is not None]
    if not given:
        return [LayerStates() for _ in range(layers)]
    return [
        LayerStates({name: _stacked([x[i][name] for x in given]) for name in given[0][i]})
        for i in range(layers)
    ]


def _stacked(tensors: list[Tensor]) -> Tensor:
    if tensors[0].dim() > 1:
        length = max(x.shape[1] for x in tensors)
        if any(x.shape[1] != length for x in tensors):  # keys, [1, S, ...]
            tensors = [F.pad(x, (0, 0) * (x.dim() - 2) + (0, length - x.shape[1])) for x in tensors]
    return torch.cat(tensors)
