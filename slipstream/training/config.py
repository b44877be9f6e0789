"""The configuration of a run: a YAML file of sections, overridden by dotted key=value arguments.

output_dir: runs/name
init_from: runs/other                            a model to begin with instead of new weights
model: {mixers: [...], hidden_size: ...}         SlipstreamConfig, by name
tokenizer: {vocab_size: 4096}                    Tokenizer below
data: {files: [...], row_tokens: 512}            Data below
training: {max_steps: 1000, learning_rate: ...}  transformers.TrainingArguments, by name
parallel: {shard: 2, context: 2}                 Parallel below, of the processes of torchrun
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from huggingface_hub.dataclasses import type_validator

from slipstream.runtime.files import read_text, write_text

PACKINGS = ("separator", "reset")


def _expect_least(section: str, config: Any, **least: int) -> None:
    for key, low in least.items():
        if (value := getattr(config, key)) < low:
            raise ValueError(f"{section}.{key}: want at least {low}, got {value}")


@dataclass(frozen=True)
class Tokenizer:
    """path: directory of an existing tokenizer; None trains a byte-level BPE on the spot.

    vocab_size: entries of the trained one, its one special token included.
    train_bytes: how much of the training text it is trained on, at most.
    """

    path: str | None = None
    vocab_size: int = 4096
    train_bytes: int = 20_000_000

    def __post_init__(self) -> None:
        _expect_least("tokenizer", self, train_bytes=1)
        if self.path is None and self.vocab_size <= 256:
            raise ValueError(
                "tokenizer.vocab_size: want at least 257, the bytes and a special token, got "
                f"{self.vocab_size}"
            )


@dataclass(frozen=True)
class Data:
    """files: files, directories and globs, or a single one; {stdlib} stands for Python's library.

    datasets: data sets of Hugging Face's `datasets` beside the files: "name", "name:split" or
        "name:config:split", or a directory that save_to_disk has written.
    suffixes: which files of a directory are text.
    exclude: globs, matched against the path below its directory, of files to leave out.
    eval_files: the held-out text; if empty, a share `held_out` of the documents of `files`.
    held_out: that share, from 0 to 1.
    text_field: the field of a line of a .jsonl file, or the column of a parquet file or data set,
        that has the text.
    row_tokens: tokens of a row; a batch is training.per_device_train_batch_size rows.
    lanes: how many documents are read side by side, for rows of a batch that are not alike.
    packing: "separator" lets the state run on from a document into the next, with the
        tokenizer's end-of-text token between them; "reset" starts each document afresh.
    eval_rows: rows of held-out text in an evaluation during training; the last takes all.
    """

    files: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = (".txt", ".md", ".rst", ".py", ".jsonl", ".parquet")
    exclude: tuple[str, ...] = ()
    eval_files: tuple[str, ...] = ()
    held_out: float = 0.02
    text_field: str = "text"
    row_tokens: int = 512
    lanes: int = 16
    packing: str = "separator"
    eval_rows: int = 64
    datasets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.files and not self.datasets:
            raise ValueError(
                "data.files: want at least one file, directory or glob, or data.datasets, got none"
            )
        _expect_least("data", self, row_tokens=2, lanes=1, eval_rows=1)
        if self.packing not in PACKINGS:
            raise ValueError(f"data.packing: want one of {PACKINGS}, got {self.packing!r}")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"data.held_out: want a share from 0 to 1, got {self.held_out}")


@dataclass(frozen=True)
class Parallel:
    """The dimensions of the processes that torchrun starts; their product is the number of these.

    data: read rows of their own and have copies of the model; 0 is as many as are left.
    shard: read rows of their own and have a part of the model each, of FSDP2.
    context: read the same rows, and have a part of their tokens and of the model each.
    tensor: read the same rows, and compute some heads of every layer each.
    """

    data: int = 0
    shard: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        _expect_least("parallel", self, data=0, shard=1, context=1, tensor=1)


@dataclass(frozen=True)
class RunConfig:
    """init_from: directory of a saved model or run whose weights, configuration and, unless
    tokenizer.path names another, tokenizer the run begins with; None begins with new ones.
    """

    output_dir: str
    data: Data
    model: dict[str, Any] = field(default_factory=dict)
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    training: dict[str, Any] = field(default_factory=dict)
    parallel: Parallel = field(default_factory=Parallel)
    init_from: str | None = None

    def __post_init__(self) -> None:
        if self.init_from is not None and self.model:
            key = next(iter(self.model))
            raise ValueError(f"model.{key}: has no use beside init_from, whose model it is")

    def dump(self, path: Path) -> None:
        text = yaml.safe_dump(self.plain(), sort_keys=False, default_flow_style=None)
        write_text(path, text)

    def plain(self) -> dict[str, Any]:
        """As YAML has it: dicts and lists."""
        return json.loads(json.dumps(asdict(self)))


SECTIONS = {"tokenizer": Tokenizer, "data": Data, "parallel": Parallel}


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run's config.

    Args:
        overrides: "section.key=value", the value in YAML: "data.row_tokens=256".

    Raises:
        ValueError: no YAML in UTF-8, a key that does not exist or a value that cannot be.
        TypeError: a value of another type.
    """
    if not Path(path).is_file():
        raise ValueError(f"{path}: want a file with a training config, such as configs/hybrid.yaml")
    raw = read_yaml(read_text(Path(path)), str(path))
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: want a mapping of sections, got {type(raw).__name__}")
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"{override}: want key=value, such as training.max_steps=100")
        _set(raw, key.strip().split("."), read_yaml(value, override))
    return from_dict(raw)


def from_dict(raw: Mapping[str, Any]) -> RunConfig:
    """Raises as `load` does. A section without a value is as one that is left out."""
    if raw.get("output_dir") is None:
        expect_keys("", raw, get_type_hints(RunConfig))
        raise ValueError("output_dir: want a directory for the run, got none")
    given = {"data": {}} | {name: value for name, value in raw.items() if value is not None}
    for name, cls in SECTIONS.items():
        if name in given:
            given[name] = cls(**checked(f"{name}.", given[name], get_type_hints(cls)))
    return RunConfig(**checked("", given, get_type_hints(RunConfig)))


def checked(prefix: str, values: Any, hints: Mapping[str, Any]) -> dict[str, Any]:
    """The values as their type hints have them: an integer for a float is one, a list becomes the
    tuple, a single string the tuple of it.

    Raises:
        ValueError: a key that does not exist. TypeError: a value of another type.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"{prefix[:-1]}: want a mapping of keys to values, got {values!r}")
    expect_keys(prefix, values, hints)
    made = dict(values)
    for key, value in values.items():
        if get_origin(hints[key]) is tuple and isinstance(value, str | list):
            made[key] = (value,) if isinstance(value, str) else tuple(value)
        elif type(value) is int and int not in (kinds := (hints[key], *get_args(hints[key]))):
            made[key] = float(value) if float in kinds else value
        type_validator(prefix + key, made[key], hints[key])
    return made


def expect_keys(prefix: str, values: Iterable[str], known: Iterable[str]) -> None:
    """
    Raises:
        ValueError: a key that is not among the known ones; names the nearest of them.
    """
    known = list(known)
    for key in values:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            advice = f"did you mean {prefix}{near[0]}?" if near else f"want one of {known}"
            raise ValueError(f"{prefix}{key}: no such key; {advice}")


def read_yaml(text: str, source: str) -> Any:
    """YAML 1.2 as far as numbers go.

    Raises:
        ValueError: it is no YAML; names the source and the line.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        words = " ".join(str(error).split())
        raise ValueError(f"{source}: cannot be read as YAML: {words}") from error


def _set(raw: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        if raw.get(key) is None:
            raw[key] = {}
        raw = raw[key]
        if not isinstance(raw, dict):
            raise ValueError(f"{'.'.join(keys)}: {key} is no section")
    raw[keys[-1]] = value


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats: PyYAML reads 3e-4 as a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
