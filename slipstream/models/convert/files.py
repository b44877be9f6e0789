"""Checkpoints as directories of safetensors, read and written a few tensors at a time."""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.runtime.files import read_json

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
OF_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)
"""Files that a converted checkpoint keeps as they are."""


class Weights:
    """The tensors of a checkpoint by name, each read when it is asked for.

    Args:
        aliases: regular expressions of names, and what stands for them here.
    """

    def __init__(self, directory: Path, aliases: Sequence[tuple[str, str]] = ()) -> None:
        self._files: dict[Path, Any] = {}
        if (directory / INDEX).is_file():
            index = _weight_map(directory / INDEX)
            for file in sorted(set(index.values())):
                if Path(file).name != file or not (directory / file).is_file():
                    raise ValueError(f"{directory / INDEX}: names {file}, which is not beside it")
            self._places = {name: directory / file for name, file in index.items()}
        elif (directory / ONE).is_file():
            self._places = dict.fromkeys(self._open(directory / ONE).keys(), directory / ONE)
        else:
            raise FileNotFoundError(
                f"{directory}: want {ONE} or {INDEX}; other formats of weights are not read"
            )

        self._stored: dict[str, str] = {}
        for stored in self._places:
            name = stored
            for pattern, instead in aliases:
                name = re.sub(pattern, instead, name)
            self._stored[name] = stored

    def names(self) -> set[str]:
        return set(self._stored)

    def __getitem__(self, name: str) -> Tensor:
        stored = self._stored[name]
        place = self._places[stored]
        try:
            return self._open(place).get_tensor(stored)
        except SafetensorError as error:
            raise ValueError(f"{place}: {stored}: {error}") from error

    def _open(self, place: Path) -> Any:
        if place not in self._files:
            try:
                self._files[place] = safe_open(place, "pt").__enter__()
            except SafetensorError as error:
                raise ValueError(f"{place}: no whole file of safetensors: {error}") from error
        return self._files[place]


def _weight_map(path: Path) -> dict[str, str]:
    index = read_json(path)
    found = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, dict) or not all(isinstance(x, str) for x in found.values()):
        raise ValueError(f"{path}: weight_map: want an object of names to files")
    return found


def write(directory: Path, tensors: Iterator[tuple[str, Tensor]], shard_bytes: int) -> int:
    """Writes files of at most `shard_bytes`, or of one larger tensor; returns the sum of bytes."""
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal size
        if shard:
            save_file(shard, directory / f"shard-{len(shards)}", metadata={"format": "pt"})
            shards.append(list(shard))
            shard.clear()
            size = 0

    for name, x in tensors:
        x = x.contiguous()
        if size + x.nbytes > shard_bytes:
            flush()
        # a view of another tensor would be written as all of that one
        shard[name] = x.clone() if x.untyped_storage().nbytes() != x.nbytes else x
        size, total = size + x.nbytes, total + x.nbytes
    flush()
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / ONE)
        return total
    places = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        (directory / f"shard-{i}").rename(directory / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return total


def copy_tokenizer(source: Path, target: Path) -> None:
    for pattern in OF_TOKENIZER:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copy(file, target / file.name)
