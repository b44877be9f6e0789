"""Text as rows of a fixed number of tokens, streamed, continuing exactly where it stopped.

The stream is the documents' tokens, each document followed by the end-of-text token. Row i+1
begins with the last token of row i, so that every token but the first is predicted once.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerFast

from slipstream.training.corpus import Corpus
from slipstream.training.tokenizer import end_of_text

IGNORED = -100


class Position(NamedTuple):
    """Token number `token` of the piece at byte `offset` of the epoch's file number `file`."""

    epoch: int = 0
    file: int = 0
    offset: int = 0
    token: int = 0


class Rows(IterableDataset):
    """Rows {"input_ids" [row_tokens], "position": where the next row begins}.

    Args:
        seed: shuffles the files, anew every epoch; None keeps their order.
        epochs: how often to go through them; None is without end.
        limit: stop after so many rows.

    `start` says where the next iteration begins.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: PreTrainedTokenizerFast,
        row_tokens: int,
        seed: int | None = None,
        epochs: int | None = None,
        limit: int | None = None,
    ) -> None:
        self.corpus, self.tokenizer, self.row_tokens = corpus, tokenizer, row_tokens
        self.seed, self.epochs, self.limit = seed, epochs, limit
        self.start = Position()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return islice(self._rows(), self.limit)

    def _rows(self) -> Iterator[dict[str, Any]]:
        row: list[int] = []
        for place, ids in self._pieces(self.start):
            token = place.token
            while token < len(ids):
                take = min(self.row_tokens - len(row), len(ids) - token)
                row += ids[token : token + take]
                token += take
                if len(row) == self.row_tokens:
                    yield {
                        "input_ids": torch.tensor(row),
                        "position": place._replace(token=token - 1),
                    }
                    row = row[-1:]

    def _pieces(self, start: Position) -> Iterator[tuple[Position, list[int]]]:
        """Token ids of each piece from `start` on, with the piece's position."""
        encode, end = self.tokenizer.backend_tokenizer.encode, end_of_text(self.tokenizer)
        epoch = start.epoch
        while self.epochs is None or epoch < self.epochs:
            order = self._order(epoch)
            empty, whole = True, start == Position(epoch)
            for number in range(start.file, len(order)):
                file = self.corpus.files[order[number]]
                for piece in self.corpus.pieces(file, start.offset):
                    ids = encode(piece.text, add_special_tokens=False).ids
                    empty = False
                    yield (
                        Position(epoch, number, piece.offset, start.token),
                        ids + [end] if piece.ends else ids,
                    )
                    start = Position()
                start = Position()
            if empty and whole:
                raise ValueError("data.files: want some text, found only empty files")
            start, epoch = Position(), epoch + 1

    def _order(self, epoch: int) -> list[int]:
        count = len(self.corpus.files)
        if self.seed is None:
            return list(range(count))
        return np.random.default_rng([self.seed, epoch]).permutation(count).tolist()


class Tally(NamedTuple):
    """Where the row after a batch begins, its predicted tokens, the bytes of text they are."""

    position: Position
    targets: int
    text_bytes: int


class Collator:
    """Rows -> a batch for the model; "separator": [B, T]; "reset": [1, B * T] with cu_seqlens.

    Args:
        end: id of the end-of-text token.
        token_bytes: bytes of text each id stands for, [vocabulary].
    """

    def __init__(self, packing: str, end: int, token_bytes: Tensor) -> None:
        self.packing, self.end, self.token_bytes = packing, end, token_bytes

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        ids = torch.stack([row["input_ids"] for row in rows])
        begins = torch.zeros_like(ids, dtype=torch.bool)
        begins[:, 0] = True
        if self.packing == "reset":
            begins[:, 1:] = ids[:, :-1] == self.end
        labels = ids.masked_fill(begins, IGNORED)  # the first of a sequence is predicted by nothing
        batch: dict[str, Any] = {"input_ids": ids, "labels": labels}
        if self.packing == "reset":
            batch = {name: x.view(1, -1) for name, x in batch.items()}
            batch["cu_seqlens"] = _offsets(begins.view(-1))
        predicted = ids[~begins]
        text_bytes = int(self.token_bytes[predicted].sum())
        return {**batch, "tally": Tally(rows[-1]["position"], len(predicted), text_bytes)}


def _offsets(begins: Tensor) -> Tensor:
    ends = torch.tensor([begins.shape[0]])
    return torch.cat([begins.nonzero()[:, 0], ends]).to(torch.int32)
