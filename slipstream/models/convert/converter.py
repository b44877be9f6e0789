"""convert: the checkpoint of one model as that of another."""

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig

from slipstream.models.config import SlipstreamConfig
from slipstream.models.convert import families, files, fla, mamba, qwen_kimi, rules, rwkv7
from slipstream.models.model import SlipstreamForCausalLM
from slipstream.runtime.files import read_json

FAMILIES: dict[str, families.Family] = {
    x.name: x
    for x in (
        fla.GLA(),
        fla.RetNet(),
        fla.DeltaNet(),
        fla.GatedDeltaNet(),
        fla.KDA(),
        fla.ForgettingTransformer(),
        rwkv7.RWKV7(),
        mamba.FlaMamba2(),
        mamba.Mamba2(),
        mamba.Mamba3(),
        qwen_kimi.Qwen3Next(),
        qwen_kimi.KimiLinear(),
    )
}
"""Name -> the family: of transformers qwen3_next, kimi_linear and mamba2, of fla the others."""

OURS = "slipstream"


class Converted(NamedTuple):
    """source, target: names of the families. parameters: how many numbers were written."""

    source: str
    target: str
    parameters: int
    weight_bytes: int


def convert(
    source: str | Path,
    target: str | Path,
    to: str = OURS,
    ignore: Collection[str] = (),
    shard_bytes: int = 5_000_000_000,
    shown: Callable[[int, int], None] | None = None,
) -> Converted:
    """Writes a checkpoint of safetensors as that of another model, with the same logits.

    Args:
        source: the directory of a checkpoint; its config.json says whose it is.
        target: a directory that does not exist yet.
        to: "slipstream", or the name of one of FAMILIES for a checkpoint of Slipstream's.
        ignore: keys of the source's config to leave out of account.
        shard_bytes: how large a file of weights may get.
        shown: called with how many of how many steps are done, a few weights each.

    Numbers keep their dtypes. Files of a tokenizer are copied.

    Raises:
        ValueError: a key of the config or a weight that the other model has no place for; weights
            that are missing or of another shape. FileExistsError, FileNotFoundError: as usual.

    Cost: reads and writes every weight once; memory of one file of weights.
    """
    source, target = Path(source), Path(target)
    given = _read_config(source)
    for key in ignore:
        if given.pop(key, None) is None:
            raise ValueError(f"ignore: {key} is not in {source / 'config.json'}")
    if target.exists():
        raise FileExistsError(f"{target}: want a directory that does not exist yet")
    whose = _family_of(given, source)
    if (whose is None) == (to == OURS):
        known = ", ".join(FAMILIES)
        want = f"want one of {known}" if whose is None else f"want {OURS!r}"
        raise ValueError(f"to: {want} for a {given['model_type']} checkpoint, got {to!r}")
    if whose is not None:
        family, config = whose, SlipstreamConfig(**_read(whose, given))
        theirs = None
    else:
        if to not in FAMILIES:
            raise ValueError(f"to: want one of {', '.join(FAMILIES)}, got {to!r}")
        family, config = FAMILIES[to], SlipstreamConfig(**_without(given, "model_type"))
        theirs = family.write(config)
        families.expect_equal(config, SlipstreamConfig(**family.read(dict(theirs))), family.name)
    with torch.device("meta"):
        model = SlipstreamForCausalLM(config)
    rules = list(family.rules(config, model))
    weights = files.Weights(source, () if whose is None else whose.aliases)
    shapes = _shapes(model, config)
    # one that has none is an option's which the family does not have
    without = sorted(shapes.keys() - {x for rule in rules for x in rule.ours})
    assert not without, without
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    names = {x for rule in rules for x in (rule.ours if theirs is not None else rule.theirs)}
    _expect_names(weights.names() - tied, names, family.dropped)
    beside = target.with_name(f"{target.name}.partial-{os.getpid()}")
    beside.mkdir(parents=True)
    try:
        counted = rules if shown is None else _counted(rules, shown)
        changed = _changed(counted, weights, shapes, theirs is not None)
        total = files.write(beside, changed, shard_bytes)
        files.copy_tokenizer(source, beside)
        _write_config(beside, config, family, theirs, given)
        beside.rename(target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    count = sum(shape.numel() for shape in shapes.values())
    return Converted(OURS if whose is None else whose.name, to, count, total)


def _counted(rules: list[rules.Rule], shown: Callable[[int, int], None]) -> Iterator[rules.Rule]:
    for done, rule in enumerate(rules):
        shown(done, len(rules))
        yield rule
    shown(len(rules), len(rules))


def _changed(
    rules: Iterable[rules.Rule], weights: files.Weights, shapes: dict[str, torch.Size], back: bool
) -> Iterator[tuple[str, Tensor]]:
    for rule in rules:
        inputs, outputs = (rule.ours, rule.theirs) if back else (rule.theirs, rule.ours)
        given = [weights[name] for name in inputs]
        if back:
            _expect_shapes(rule.ours, given, shapes)
        try:
            made = rule.save(given) if back else rule.load(given)
        except RuntimeError as error:
            sizes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in zip(inputs, given))
            raise ValueError(f"{sizes}: shapes that the config does not give: {error}") from error
        if not back:
            _expect_shapes(rule.ours, made, shapes)
        yield from zip(outputs, made, strict=True)


def _expect_shapes(
    names: tuple[str, ...], tensors: list[Tensor], shapes: dict[str, torch.Size]
) -> None:
    for name, x in zip(names, tensors, strict=True):
        if x.shape != shapes[name]:
            raise ValueError(
                f"{name}: want shape {tuple(shapes[name])} by the config, got {tuple(x.shape)}"
            )


def _expect_names(found: set[str], wanted: set[str], dropped: tuple[str, ...]) -> None:
    found = {x for x in found if not any(re.match(pattern, x) for pattern in dropped)}
    for what, names in (("missing", wanted - found), ("unexpected", found - wanted)):
        if names:
            some = sorted(names)
            more = f" and {len(some) - 3} more" if len(some) > 3 else ""
            raise ValueError(f"weights: {what} in the checkpoint: {', '.join(some[:3])}{more}")


def _shapes(model: Any, config: SlipstreamConfig) -> dict[str, torch.Size]:
    tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
    return {name: x.shape for name, x in model.state_dict().items() if name not in tied}


_OF_VALUES = (TypeError, AttributeError, ZeroDivisionError, ValueError)


def _read(family: families.Family, given: dict[str, Any]) -> dict[str, Any]:
    """
    Raises:
        ValueError: names the key whose value no such model can have, such as None for a size.
    """
    try:
        return family.read(given)
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        for key, value in given.items():
            try:
                family.read(_without(given, key))
            except _OF_VALUES:
                continue
            want = f"want a value that a {family.name} model can have"
            raise ValueError(f"{key}: {want}, got {value!r} ({error})") from error
        raise ValueError(f"config.json: of no {family.name} model ({error})") from error


def _family_of(given: dict[str, Any], source: Path) -> families.Family | None:
    """None for a checkpoint of ours."""
    kind = given.get("model_type")
    if kind == SlipstreamConfig.model_type:
        return None
    for family in FAMILIES.values():
        if family.matches(given):
            return family
    raise ValueError(
        f"{source / 'config.json'}: model_type: want {OURS} or one of "
        f"{', '.join(dict.fromkeys(x.model_type for x in FAMILIES.values()))}, got {kind!r}"
    )


def _read_config(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    try:
        given = read_json(path)
    except OSError as error:
        raise FileNotFoundError(f"{source}: want a directory with a config.json") from error
    if not isinstance(given, dict):
        raise ValueError(f"{path}: want an object, got {type(given).__name__}")
    # infinities, which JSON has no number for
    return PreTrainedConfig._decode_special_floats(given)


def _write_config(
    target: Path,
    config: SlipstreamConfig,
    family: families.Family,
    theirs: dict[str, Any] | None,
    given: dict[str, Any],
) -> None:
    dtype = given.get("dtype", given.get("torch_dtype"))
    if theirs is None:
        config.architectures = [SlipstreamForCausalLM.__name__]
        if dtype is not None:
            config.dtype = getattr(torch, dtype)
        config.save_pretrained(target)
        return
    written = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        "transformers_version": transformers.__version__,
        **theirs,
    }
    written = {key: value for key, value in written.items() if value is not None}
    text = json.dumps(PreTrainedConfig._encode_special_floats(written), indent=2, sort_keys=True)
    (target / "config.json").write_text(text, encoding="utf-8")


def _without(given: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in given.items() if k != key}
