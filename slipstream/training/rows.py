"""Text as rows of a fixed number of tokens, streamed, continuing exactly where it stopped.

A lane is a stream of documents' tokens, each document followed by the end-of-text token. A lane's
next row begins with the last token of the one before, so that every token but the first is
predicted once. The files are divided among several lanes, read in turn: so the rows of a batch come
from different documents.
"""

from collections.abc import Iterator
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerFast

from slipstream.runtime.token_ids import IGNORED
from slipstream.training import corpus, tokenizer


class Position(NamedTuple):
    """Token number `token` of the piece at byte `offset` of the epoch's file number `file`."""

    epoch: int = 0
    file: int = 0
    offset: int = 0
    token: int = 0


class Cursor(NamedTuple):
    """Whose row is next, and where the next row of each lane begins."""

    turn: int
    lanes: tuple[Position, ...]


class Rows(IterableDataset):
    """Rows {"input_ids" [row_tokens], "cursor": what follows this row}.

    Args:
        lanes: how many, at most one a file.
        seed: shuffles the files, anew every epoch; None keeps their order.
        epochs: how often to go through them; None is without end.
        limit: stop after so many rows.

    `start` says where the next iteration begins.
    """

    def __init__(
        self,
        corpus: corpus.Corpus,
        tokenizer: PreTrainedTokenizerFast,
        row_tokens: int,
        *,
        lanes: int = 1,
        seed: int | None = None,
        epochs: int | None = None,
        limit: int | None = None,
    ) -> None:
        self.corpus, self.tokenizer, self.row_tokens = corpus, tokenizer, row_tokens
        self.seed, self.epochs, self.limit = seed, epochs, limit
        self.start = Cursor(0, (Position(),) * max(1, min(lanes, len(corpus.files))))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return islice(self._in_turn(), self.limit)

    def _in_turn(self) -> Iterator[dict[str, Any]]:
        turn, places = self.start.turn, list(self.start.lanes)
        lanes = [self._rows(lane, place) for lane, place in enumerate(places)]
        ended: set[int] = set()
        begin = places[:]
        while len(ended) < len(lanes):
            lane, turn = turn, (turn + 1) % len(lanes)
            row = next(lanes[lane], None)
            if row is None:
                ended.add(lane)
                continue
            ids, places[lane] = row
            yield {
                "input_ids": torch.tensor(ids, device="cpu"),
                "cursor": Cursor(turn, tuple(places)),
            }
        if places == begin:
            raise ValueError(f"data: want text for a row of {self.row_tokens} tokens, found less")

    def _rows(self, lane: int, start: Position) -> Iterator[tuple[list[int], Position]]:
        """A lane's rows, each with the position of the one after it."""
        row: list[int] = []
        for place, ids in self._pieces(lane, start):
            token = place.token
            while token < len(ids):
                take = min(self.row_tokens - len(row), len(ids) - token)
                row += ids[token : token + take]
                token += take
                if len(row) == self.row_tokens:
                    yield row, place._replace(token=token - 1)
                    row = row[-1:]

    def _pieces(self, lane: int, start: Position) -> Iterator[tuple[Position, list[int]]]:
        """Token ids of each piece from `start` on, with the piece's position."""
        encode, end = self.tokenizer.backend_tokenizer.encode, tokenizer.end_of_text(self.tokenizer)
        epoch = start.epoch
        while self.epochs is None or epoch < self.epochs:
            order = self._order(lane, epoch)
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
                return  # or an endless stream of nothing
            start, epoch = Position(), epoch + 1

    def _order(self, lane: int, epoch: int) -> list[int]:
        """A lane's files: always the same ones, in another order each epoch."""
        files = range(lane, len(self.corpus.files), len(self.start.lanes))
        if self.seed is None:
            return list(files)
        return np.random.default_rng([self.seed, epoch, lane]).permutation(files).tolist()


class Batches(IterableDataset):
    """Lists of `size` rows: of each group of `ranks` lists, one for every rank, that of this rank.

    The workers of a DataLoader take turns, as the DataLoader does when it reads from them: so the
    batches are the same, in the same order, with any number of workers. Each worker reads all of
    the text. The cursor of the rows is the one after their group.
    """

    def __init__(self, rows: Rows, size: int, rank: int = 0, ranks: int = 1) -> None:
        self.rows, self.size, self.rank, self.ranks = rows, size, rank, ranks

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        rows = iter(self.rows)
        begin, end = self.rank * self.size, (self.rank + 1) * self.size
        for i in count():
            group = list(islice(rows, self.size * self.ranks))
            if i % workers == number and (batch := group[begin:end]):
                yield [{**row, "cursor": group[-1]["cursor"]} for row in batch]
            if len(group) < self.size * self.ranks:
                return


class Tally(NamedTuple):
    """The cursor after a batch, the number of its predicted tokens and of their bytes of text."""

    cursor: Cursor
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
        return {**batch, "tally": Tally(rows[-1]["cursor"], len(predicted), text_bytes)}


def _offsets(begins: Tensor) -> Tensor:
    ends = torch.tensor([begins.shape[0]], device=begins.device)
    return torch.cat([begins.nonzero()[:, 0], ends]).to(torch.int32)
