"""Data sets of Hugging Face's `datasets`, and parquet files, as documents: one a row.

A data set is "name", "name:split" or "name:config:split", or a directory that save_to_disk has
written. It is cut into as many parts as there are lanes, so that the rows of a batch come from
different places in it.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from slipstream.common import extras
from slipstream.training.config import Data


@dataclass(frozen=True)
class Table:
    """Rows begin to end of one data set or parquet file.

    path: as File.path, of a parquet file; for messages otherwise. name: of the whole data set.
    """

    path: Path
    name: str
    begin: int
    end: int
    source: str | None = None

    has_lines = True  # as a .jsonl file: documents that are held out one by one

    @property
    def size(self) -> int:
        """Rows; stands for bytes where files are compared."""
        return self.end - self.begin

    def rows(self) -> Any:
        return _dataset(self.source) if self.source is not None else _parquet(str(self.path))

    def text(self, row: int, field: str) -> str:
        """
        Raises:
            ValueError: there is no such column, or no text in it.
        """
        rows = self.rows()
        if field not in rows.column_names:
            raise ValueError(
                f"{self.name}: want a column of text, data.text_field is {field!r}; its columns "
                f"are {', '.join(rows.column_names)}"
            )
        text = rows[row][field]
        if not isinstance(text, str):
            raise ValueError(f"{self.name}, row {row}: {field}: want text, got {text!r:.60}")
        return text


def of_data_sets(data: Data) -> list[Table]:
    """The parts of all data sets of a config."""
    found = []
    for source in data.datasets:
        found += _parts(Path(source), source, len(_dataset(source)), data.lanes, source)
    return found


def of_parquet(path: Path, name: str, data: Data) -> list[Table]:
    return _parts(path, name, len(_parquet(str(path))), data.lanes, None)


def _parts(path: Path, name: str, rows: int, parts: int, source: str | None) -> list[Table]:
    parts = max(1, min(parts, rows))
    cuts = [rows * i // parts for i in range(parts + 1)]
    return [Table(path, name, begin, end, source) for begin, end in pairwise(cuts)]


def _library() -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise extras.missing("data.datasets and parquet files", error) from None
    datasets.disable_progress_bars()
    return datasets


@lru_cache
def _dataset(source: str) -> Any:
    datasets = _library()
    if Path(source).is_dir():
        loaded = datasets.load_from_disk(source)
        if not hasattr(loaded, "column_names") or isinstance(loaded.column_names, dict):
            raise ValueError(f"data.datasets: want one split, {source} has {', '.join(loaded)}")
        return loaded
    name, *more = source.split(":")
    if len(more) > 2:
        raise ValueError(
            f"data.datasets: want name, name:split or name:config:split, got {source!r}"
        )
    config, split = (more[0], more[1]) if len(more) == 2 else (None, more[0] if more else "train")
    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the library's own kinds are many
        words = " ".join(str(error).split())
        raise ValueError(f"data.datasets: {source}: cannot be loaded: {words}") from error


@lru_cache
def _parquet(path: str) -> Any:
    datasets = _library()
    try:
        return datasets.load_dataset("parquet", data_files=path, split="train")
    except Exception as error:
        words = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read as parquet: {words}") from error
