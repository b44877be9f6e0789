"""slipstream.compat.fla has fla's names, positional order and defaults (fla_signatures.json)."""

import inspect
import json
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

import slipstream.compat.fla
from slipstream.compat.fla.adaptor import CONTEXT, HINTS, REFUSED, parse_signature
from slipstream.compat.fla.operators import OPERATORS
from slipstream.compat.fla.paths import ALIASES, FUNCTIONS, MISSING

SNAPSHOT = json.loads((Path(__file__).parent / "fla_signatures.json").read_text())
VERSION, _ = SNAPSHOT.pop("fla"), SNAPSHOT.pop("configs")
ROOT = "slipstream.compat.fla"
# what is other on purpose, and why
DIFFERENT = {
    # fla raises for any call
    "ops.delta_rule.fused_chunk.fused_chunk_delta_rule",
    "ops.gla.fused_chunk.fused_chunk_gla",
    # **kwargs are named, so that others are refused
    "modules.causal_conv1d.ops.causal_conv1d",
}


def _member(path: str) -> Any:
    """The member at a path such as modules.mlp.GatedMLP.forward."""
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        module = sys.modules.get(".".join([ROOT, *parts[:i]]))
        if module is not None and hasattr(module, parts[i]):
            return reduce(getattr, parts[i:], module)
    raise AssertionError(path)


def _text(function: Any) -> str:
    bare = [
        p.replace(annotation=inspect.Parameter.empty)
        for p in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(bare))


def _reference_text(signature: str) -> str:
    """str(inspect.signature) of the parameters that a text of fla's stands for."""
    scope: dict[str, Any] = {}
    names = {"torch": __import__("torch")}
    exec(f"def f{signature}: ...", names, scope)
    return _text(scope["f"])


@pytest.mark.parametrize("path", sorted(SNAPSHOT))
def test_signature_matches_fla(path: str) -> None:
    ours, theirs = _text(_member(path)), _reference_text(SNAPSHOT[path])
    assert (ours != theirs) == (path in DIFFERENT), f"{ours}\n{theirs}"


def test_snapshot_is_of_this_version_and_of_every_operator() -> None:
    assert slipstream.compat.fla.__version__ == VERSION
    operators = {f"{row.path}.{row.name}" for row in OPERATORS}
    others = {f"{path}.{f.__name__}" for path, f in FUNCTIONS.items()}
    # chunk_gdn and fused_recurrent_gdn are assigned, not defined
    assert {x for x in operators | others if x not in SNAPSHOT and not x.endswith("_gdn")} == set()


@pytest.mark.parametrize("row", OPERATORS, ids=lambda row: row.name)
def test_every_argument_of_fla_means_something(row: Any) -> None:
    """It is an argument of ours, one without effect, or refused by name."""
    ours = set(inspect.signature(row.function).parameters)
    for p in parse_signature(row.signature).parameters.values():
        name = "context" if p.name == CONTEXT else row.renamed.get(p.name, p.name)
        others = name in HINTS or name in REFUSED or p.kind is p.VAR_KEYWORD
        assert name in ours or others or (name == "kk" and row.change is not None)
    for name in row.renamed:
        assert name in parse_signature(row.signature).parameters


def test_names_are_exported_by_the_parents() -> None:
    for row in OPERATORS:
        parts = row.path.split(".")
        for i in range(1, len(parts) + 1):
            module = sys.modules[".".join([ROOT, *parts[:i]])]
            assert hasattr(module, row.name), (module, row.name)


def test_aliases_are_the_same_modules() -> None:
    for alias, path in ALIASES.items():
        assert sys.modules[f"{ROOT}.{alias}"] is sys.modules[f"{ROOT}.{path}"]


def test_missing_names_are_missing() -> None:
    for path, names in MISSING.items():
        module = sys.modules[f"{ROOT}.{path}"]
        for name in names:
            assert name not in vars(module)
            with pytest.raises(ImportError, match=rf"no fla\.{path}\.{name}; .*\('fla'\) goes"):
                getattr(module, name)
