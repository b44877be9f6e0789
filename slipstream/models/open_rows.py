"""The rows of a StateCache: which there are, and which columns of theirs hold no token.

Models with consistent=True keep sequences by themselves (consistent.py), in place of tensors of all
rows; or, while steps run, their blocks (block_steps.py)."""

import operator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from slipstream.models import block_steps, consistent, packing, rollback
from slipstream.nn.rounded import SCALE
from slipstream.runtime.token_ids import clamped, expect_ids


def expect_int(name: str, n: Any) -> int:
    """n as an int: of a tensor, which its owner may change, its number now."""
    if isinstance(n, torch.SymInt):
        return n  # pyright: ignore[reportReturnType]
    try:
        if isinstance(n, bool):  # as an index True is a mask
            raise TypeError
        return operator.index(n)
    except TypeError:
        raise TypeError(f"{name}: want an int, got {type(n).__name__}") from None


def expect_count(name: str, n: int) -> int:
    n = expect_int(name, n)
    if n < 0:
        raise ValueError(f"{name}: want 0 or more, got {n}")
    return n


def expect_row(row: int, rows: int) -> int:
    row = expect_int("row", row)
    if not 0 <= row < rows:
        raise ValueError(f"row: want one of {rows}, got {row}")
    return row


class OpenRows(Cache):
    layers: list[Any]  # LayerState
    graphs: dict[Any, Any]
    lengths: list[int] | None  # of a pool: how many tokens each row has
    # a Row of each sequence; None before the first call, and for other models
    _rows: list[consistent.Row] | None = None
    # tensors of steps, which graphs have read; and whether steps have gone on from _rows there
    _blocks: block_steps.OpenBlocks | None = None
    _stepped = False
    _absent: packing.Absent | None = None

    @property
    def open_rows(self) -> list[consistent.Row] | None:
        """A Row of each sequence; None before the first call, and for other models."""
        if self._stepped:
            assert self._blocks is not None
            self.open_rows = self._blocks.rows()
        return self._rows

    @open_rows.setter
    def open_rows(self, rows: list[consistent.Row] | None) -> None:
        self._rows, self._stepped = rows, False

    @property
    def rows(self) -> int:
        """The number of rows N; 0 before the first call."""
        if self._rows is not None:
            return len(self._rows)
        for layer in self.layers:
            for x in (layer.state or {}).values():
                return x.shape[0]
        return 0

    @property
    def has_open_rows(self) -> bool:
        return self._rows is not None

    def blocks_for(self, model: Any, tokens: int) -> block_steps.OpenBlocks:
        """The rows as tensors of fixed addresses, with room for so many more tokens; graphs go if
        there have to be others. Whoever steps there calls step_on of the cache."""
        blocks = self._blocks
        if self._stepped and blocks is not None and blocks.fits(max(blocks.lengths), tokens):
            return blocks
        rows = self.open_rows
        assert rows is not None
        longest = max(row.length for row in rows)
        if blocks is None or not blocks.takes(rows) or not blocks.fits(longest, tokens):
            self.graphs.clear()
            blocks = self._blocks = block_steps.OpenBlocks.of(model, rows, tokens)
        else:
            blocks.load(model, rows)
        self._stepped = True
        return blocks

    def drop_blocks(self) -> None:
        """Drops the blocks; the next step makes new ones in the dtypes of the states."""
        self.open_rows, self._blocks = self.open_rows, None

    def step_blocks_on(self, tokens: int) -> None:
        if self._stepped and self._blocks is not None:
            self._blocks.lengths = [n + tokens for n in self._blocks.lengths]

    def _expect_tensors(self, what: str) -> None:
        if self.has_open_rows:
            raise NotImplementedError(f"{what}: is not implemented for a consistent cache")

    def _choose(self, rows: list[int]) -> None:
        found = self.open_rows
        if found is not None:
            self.open_rows = [found[n] for n in rows]
        if self.lengths is not None:
            self._set_lengths([self.lengths[n] for n in rows])

    def _set_lengths(self, lengths: list[int]) -> None:
        """Sets the lengths of a pool's rows; its layers count the columns of the longest."""
        self.lengths = lengths
        for layer in self.layers:
            layer.seen = max(lengths, default=0)

    def bytes_of_rows(self) -> int:
        return sum(row.bytes() for row in self.open_rows or ())

    def _own(self, detach: bool = True) -> None:
        """Makes all tensors such as may be written here (LayerState); graphs go with what moved."""
        moved = [layer._own(detach) for layer in self.layers]
        if any(moved):
            self.graphs.clear()

    @property
    def absent(self) -> packing.Absent:
        """Columns without a token."""
        if self._absent is None:
            self._absent = packing.Absent()
        return self._absent

    def _there(self, name: str, rows: Any) -> Tensor:
        """Indices of rows; on CUDA the next call raises for those that are not there."""
        if not isinstance(rows, Tensor) or rows.is_floating_point() or rows.is_complex():
            kind = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
            raise TypeError(f"{name}: want a tensor of integers, got {kind}")
        if rows.dim() != 1:
            raise ValueError(f"{name}: want shape (N,), got {tuple(rows.shape)}")
        if rows.dtype == torch.bool:
            if name == "beam_idx":
                raise TypeError(f"{name}: want a tensor of integers, got {rows.dtype}")
            if self.rows and len(rows) != self.rows:
                raise ValueError(f"{name}: want {self.rows} bools, got {len(rows)}")
            return rows
        rows = rows.long()  # torch takes 8 bits for a mask, and indexes by no 16
        if not self.rows:
            return rows
        expect_ids(name, rows, self.rows)
        return clamped(rows, self.rows)

    def reorder_cache(self, beam_idx: Any) -> None:
        beam_idx = self._there("beam_idx", beam_idx)
        if self.rows and len(beam_idx) != self.rows:
            self.batch_select_indices(beam_idx)  # tensors of other sizes
            return
        blocks = self._blocks if self._stepped else None
        if blocks is not None:
            blocks.reorder(beam_idx)
        elif self.has_open_rows or self.lengths is not None:
            self._choose(beam_idx.tolist())
        self._absent = self.absent.map(lambda x: x[beam_idx.to(x.device)])
        self._own(detach=not torch.is_grad_enabled())
        super().reorder_cache(beam_idx)

    def _expect_fits(self, cache: Any) -> None:
        """Refuses, before anything is written, all but a cache of one row of a model like this
        pool's."""
        if not isinstance(cache, OpenRows):
            raise TypeError(f"put: want a StateCache or None, got {type(cache).__name__}")
        if cache.rows != 1:
            raise ValueError(f"put: want a cache of one row, got {cache.rows}")
        if len(cache.layers) != len(self.layers):
            raise ValueError(f"put: want {len(self.layers)} layers, got {len(cache.layers)}")
        for i, (layer, other) in enumerate(zip(self.layers, cache.layers)):
            own, given = layer.state or {}, other.state or {}
            if own.keys() != given.keys():
                text = f"put: want {sorted(own)} of layer {i}, got {sorted(given)}"
                raise ValueError(f"{text}: of another model")
            for name, x in given.items():
                first = 2 if name.removesuffix(SCALE) in layer.token_states else 1
                mine = own[name]
                sizes = tuple(mine.shape[first:]), tuple(x.shape[first:])
                for want, got in (sizes, (mine.device, x.device)):
                    if want != got:
                        text = f"put: want {name!r} of layer {i} as the pool's, {want}"
                        raise ValueError(f"{text}, got {got}")

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -n columns of every row; a positive n is how many to keep.

        Raises:
            ValueError: there are fewer; or a recurrent layer would have to forget a part of a call
                with padding or gradients, or a softmax layer one of packed sequences; or the
                states of a consistent model before them are gone.
            RuntimeError: recurrent layers did not record. NotImplementedError: it is a pool.
        """
        tokens_to_remove = expect_int("tokens_to_remove", tokens_to_remove)
        if self.lengths is not None:
            raise NotImplementedError(
                "crop: want no pool, whose rows are of different lengths; crop what copy(row) "
                "returns, and put it back"
            )
        seen = self.get_seq_length()
        keep = seen + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, seen)
        for layer in self.layers:  # before one of them forgets anything
            rollback.forgotten_tokens(layer, tokens_to_remove)
        absent = self.absent.after(keep)
        rows = self.open_rows
        if rows is not None:
            gone = [seen - keep] * len(rows)
            if absent is not None:
                gone = [n - m for n, m in zip(gone, absent.tolist())]
            self.open_rows = [row.without(n) for row, n in zip(rows, gone)]
        self._own(detach=False)
        super().crop(tokens_to_remove)
        self.absent.crop(keep)
        for layer in self.layers:
            if absent is not None and (length := (layer.state or {}).get("length")) is not None:
                length.add_(absent.to(length.device))

    def reset(self) -> None:
        self.open_rows = self._absent = None
        self._own()
        super().reset()
        if self.lengths is not None:  # rows that put may fill, of no tokens
            self.lengths = [0] * len(self.lengths)
            for layer in self.layers:
                layer.is_initialized = True
                for row in range(len(self.lengths)):
                    layer.put(row, None)

    def batch_select_indices(self, indices: Tensor) -> None:
        indices = self._there("batch_select_indices", indices)
        if self.has_open_rows or self.lengths is not None:
            self._choose(torch.arange(self.rows, device="cpu")[indices.cpu()].tolist())
        self._absent = self.absent.map(lambda x: x[indices.to(x.device)])
        super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._choose([n for n in range(self.rows) for _ in range(repeats)])
        self._absent = self.absent.map(lambda x: x.repeat_interleave(repeats, dim=0))
        super().batch_repeat_interleave(repeats)
