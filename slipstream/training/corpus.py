"""Texts as documents, read lazily, and their split into training and held-out ones.

A document is a file, a line of a .jsonl file or a row of a table: parquet, or a data set of Hugging
Face's `datasets`. Its text comes in pieces of about a megabyte, each with the offset of its first
byte, so that reading can continue in the middle of a file. A table is cut into as many parts as
there are lanes, so that the rows of a batch come from different places in it.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from glob import glob, has_magic
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.common import extras
from slipstream.training.config import Data

# bytes of a text that are read at a time
PIECE = 1 << 20
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z", ".tar", ".tgz")
SURROGATE = re.compile("[\ud800-\udfff]")


class Piece(NamedTuple):
    """Text from byte `offset` of a file; `ends` if a document ends with it."""

    offset: int
    text: str
    ends: bool


@dataclass(frozen=True)
class Table:
    """Rows begin to end of one data set or parquet file, of which `load` takes the source.

    name: of the whole, the same on every machine.
    """

    source: str
    name: str
    begin: int
    end: int

    has_lines = True  # as a .jsonl file: documents that are held out one by one

    @property
    def path(self) -> Path:
        return Path(self.source)

    @property
    def size(self) -> int:
        """Rows; stands for bytes where files are compared."""
        return self.end - self.begin

    def text(self, row: int, field: str) -> str:
        """
        Raises:
            ValueError: there is no such column, or no text in it.
        """
        rows = load(self.source)
        text = rows[row][field] if field in rows.column_names else None
        if not isinstance(text, str):
            raise ValueError(
                f"{self.name}, row {row}: want text in the column {field!r}, data.text_field, got "
                f"{text!r:.60}; the columns are {', '.join(rows.column_names)}"
            )
        return text


@dataclass(frozen=True)
class File:
    """name: the path below the directory or glob it was found under, the same on every machine."""

    path: Path
    name: str

    @property
    def has_lines(self) -> bool:
        return self.path.suffix == ".jsonl"

    @property
    def size(self) -> int:
        return self.path.stat().st_size


@dataclass(frozen=True)
class Corpus:
    """Files and the share of their documents to take: the held-out ones or the others."""

    files: tuple[File | Table, ...]
    text_field: str = "text"
    held_out: float = 0.0
    want_held_out: bool = False

    def pieces(self, file: File | Table, offset: int = 0) -> Iterator[Piece]:
        """Pieces of one file from a byte offset on, which some piece must have begun at; of a table
        from a row on."""
        if isinstance(file, Table):
            for row in range(max(offset, file.begin), file.end):
                if self._takes(f"{file.name}#{row}"):
                    yield Piece(row, file.text(row, self.text_field), ends=True)
            return
        if file.has_lines:
            yield from self._lines(file, offset)
            return
        with file.path.open("rb") as f:
            while True:
                f.seek(offset)
                block = f.read(PIECE + 1)
                if len(block) <= PIECE:
                    break
                # the cut depends on the offset alone: so a piece is the same after a resume
                cut = block.rfind(b"\n", 0, PIECE) + 1 or _end_of_character(block)
                yield Piece(offset, block[:cut].decode("utf-8", "replace"), ends=False)
                offset += cut
            if block:
                yield Piece(offset, block.decode("utf-8", "replace"), ends=True)

    def _lines(self, file: File, offset: int) -> Iterator[Piece]:
        with file.path.open("rb") as f:
            f.seek(offset)
            for line in f:
                if line.strip() and self._takes(f"{file.name}#{offset}"):
                    yield Piece(offset, self._text(file, offset, line), ends=True)
                offset += len(line)

    def _text(self, file: File, offset: int, line: bytes) -> str:
        try:
            text = json.loads(line)[self.text_field]
            return SURROGATE.sub("\ufffd", text)  # half a character, which is none
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{_line(file, offset)}: want a JSON object with text in {self.text_field!r}, "
                f"data.text_field: {type(error).__name__}: {error}"
            ) from error

    def _takes(self, name: str) -> bool:
        return is_held_out(name, self.held_out) == self.want_held_out

    def fingerprint(self) -> str:
        """Changes with the names and sizes of the files: then no position in them is valid."""
        seen = [(f.name, f.size) for f in self.files]
        return hashlib.blake2b(repr(seen).encode(), digest_size=8).hexdigest()


def _end_of_character(block: bytes) -> int:
    """The last place up to PIECE that is not within a character of UTF-8; PIECE in other bytes."""
    places = range(PIECE, PIECE - 4, -1)
    return next((i for i in places if block[i] & 0xC0 != 0x80), PIECE)


def is_held_out(name: str, share: float) -> bool:
    """By the name's hash: stable, and the same wherever the files lie."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def split(data: Data) -> tuple[Corpus, Corpus]:
    """The training and the held-out corpus; no document is in both.

    Raises:
        ValueError: no files, or no documents on one of the sides.
    """
    files = find(data.files, data)
    for source in data.datasets:
        files += tables(source, source, data.lanes)
    if data.eval_files:
        held = find(data.eval_files, data, "data.eval_files")
        paths = {f.path.resolve() for f in held}
        files = [f for f in files if f.path.resolve() not in paths]
        sides = [Corpus(tuple(x), data.text_field) for x in (files, held)]
        why = "the files of data.eval_files leave"
    else:
        sides = []
        for wanted in (False, True):
            share = data.held_out
            taken = [f for f in files if f.has_lines or is_held_out(f.name, share) == wanted]
            sides.append(Corpus(tuple(taken), data.text_field, share, wanted))
        why = f"data.held_out: {data.held_out} of {len(files)} files leaves"
    for side, what in zip(sides, ("training", "held-out"), strict=True):
        if not any(True for file in side.files for _ in side.pieces(file)):
            raise ValueError(f"{why} no {what} text; name held-out files in data.eval_files")
    return sides[0], sides[1]


def find(patterns: Sequence[str], data: Data, key: str = "data.files") -> list[File | Table]:
    """Files of the patterns, in a fixed order, each once.

    Raises:
        ValueError: there is none under a pattern, or one is compressed; names the key.
    """
    found: dict[Path, File] = {}
    for pattern in patterns:
        pattern = pattern.replace("{stdlib}", os.path.dirname(os.__file__))
        root = Path(pattern)  # a name with brackets may be a file's
        if root.is_dir():
            paths = [p for p in root.rglob("*") if p.suffix in data.suffixes]
        elif root.exists():
            paths = [root]
        else:
            root = Path(glob_root(pattern))
            paths = [Path(p) for p in glob(pattern, recursive=True)]
        number = 0
        for path in filter(Path.is_file, paths):
            name = path.relative_to(root).as_posix() if path != root else path.name
            if any(fnmatch(name, x) for x in data.exclude):
                continue
            if path.suffix in COMPRESSED:
                raise ValueError(f"{key}: want text, got {path}, which is compressed")
            found.setdefault(path.resolve(), File(path, name))
            number += 1
        if not number:
            raise ValueError(f"{key}: want text files, found none under {pattern}")
    files: list[File | Table] = []
    for file in sorted(found.values(), key=lambda f: (f.name, f.path)):
        parquet = file.path.suffix == ".parquet"
        files += tables(str(file.path), file.name, data.lanes) if parquet else [file]
    return files


def glob_root(pattern: str) -> str:
    """The part of a glob before its first wildcard."""
    parts = Path(pattern).parts
    magic = next((i for i, part in enumerate(parts) if has_magic(part)), len(parts))
    return str(Path(*parts[:magic])) if magic else "."


def _line(file: File, offset: int) -> str:
    """Path and line number of a byte; found out only for an error."""
    with file.path.open("rb") as f:
        number = f.read(offset).count(b"\n") + 1
    return f"{file.path}, line {number}"


def tables(source: str, name: str, lanes: int) -> list[Table]:
    rows = len(load(source))
    parts = max(1, min(lanes, rows))
    cuts = [rows * i // parts for i in range(parts + 1)]
    return [Table(source, name, begin, end) for begin, end in pairwise(cuts)]


@lru_cache
def load(source: str) -> Any:
    """The rows of a parquet file, of a directory that save_to_disk has written, or of "name",
    "name:split" or "name:config:split"."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise extras.missing("data.datasets and parquet files", error) from None
    datasets.disable_progress_bars()
    if source.endswith(".parquet"):
        return datasets.load_dataset("parquet", data_files=source, split="train")
    if Path(source).is_dir():
        return datasets.load_from_disk(source)
    name, _, more = source.partition(":")
    config, _, split = more.rpartition(":")
    return datasets.load_dataset(name, config or None, split=split or "train")
