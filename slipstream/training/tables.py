"""Data sets of Hugging Face's `datasets`, and parquet files, as documents: one a row.

Each is cut into as many parts as there are lanes, so that the rows of a batch come from different
places in it.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from slipstream.common import extras


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
