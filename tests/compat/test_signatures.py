"""Names, positional order and defaults of fla (fla_signatures.json), of causal_conv1d 1.7.0,
flash_attn 2.8.4 with the module of FlashAttention-3 and mamba_ssm 2.3.2 (other_signatures.json);
fla's parameters; docs/guides/migrate_fla.md is what tools/fla_page.py writes."""

import importlib
import inspect
import json
import pkgutil
import re
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

import slipstream.compat.fla
from slipstream import compat
from slipstream.compat.fla import modules
from slipstream.compat.fla.adaptor import CONTEXT, HINTS, REFUSED, parse_signature
from slipstream.compat.fla.operators import OPERATORS
from slipstream.compat.fla.paths import ALIASES, FUNCTIONS, MISSING
from tests.support.forked import run_code
from tests.support.scripts import ROOT, script

SNAPSHOT = json.loads((Path(__file__).parent / "fla_signatures.json").read_text())
VERSION, _ = SNAPSHOT.pop("fla"), SNAPSHOT.pop("configs")
PACKAGE = "slipstream.compat.fla"
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
        module = sys.modules.get(".".join([PACKAGE, *parts[:i]]))
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
            module = sys.modules[".".join([PACKAGE, *parts[:i]])]
            assert hasattr(module, row.name), (module, row.name)


def test_aliases_are_the_same_modules() -> None:
    for alias, path in ALIASES.items():
        assert sys.modules[f"{PACKAGE}.{alias}"] is sys.modules[f"{PACKAGE}.{path}"]


def test_missing_names_are_missing() -> None:
    for path, names in MISSING.items():
        module = sys.modules[f"{PACKAGE}.{path}"]
        for name in names:
            assert name not in vars(module)
            with pytest.raises(ImportError, match=rf"no fla\.{path}\.{name}; .*\('fla'\) goes"):
                getattr(module, name)


C = 12
WEIGHT = {"weight": (C,)}
# class, arguments, and what the state dict of fla-core 0.6.0's has
CASES: list[tuple[Any, tuple, dict[str, tuple[int, ...]]]] = [
    *[
        (getattr(modules, f"Fused{norm}{what}"), (C,), WEIGHT)
        for norm in ("LayerNorm", "RMSNorm")
        for what in ("Gated", "SwishGate", "SwishGateLinear")
    ],
    *[
        (getattr(modules, f"{norm}{what}"), (*groups, C), WEIGHT)
        for norm, *groups in (("LayerNorm",), ("RMSNorm",), ("GroupNorm", 3))
        for what in ("", "Linear")
    ],
    (modules.GroupNorm, (3, C, True, True), {**WEIGHT, "bias": (C,)}),
    (
        modules.GatedMLP,
        (C, None, 20),
        {"gate_proj.weight": (20, C), "up_proj.weight": (20, C), "down_proj.weight": (C, 20)},
    ),
    (modules.ShortConvolution, (C, 4), {"weight": (C, 1, 4)}),
    (modules.ShortConvolution, (C, 4, True), {"weight": (C, 1, 4), "bias": (C,)}),
    (modules.RotaryEmbedding, (C,), {}),
]


@pytest.mark.parametrize(("kind", "args", "names"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_modules_have_the_parameters_of_fla(
    kind: Any, args: tuple, names: dict[str, tuple[int, ...]]
) -> None:
    found = {name: tuple(x.shape) for name, x in kind(*args).state_dict().items()}
    assert found == names


fla_page = script("tools/fla_page")
PAGE = fla_page.PAGE.read_text("utf-8")


def test_page_is_written_from_the_tables() -> None:
    names = [x[2] for x in fla_page.PART.finditer(PAGE)]
    assert sorted(names) == sorted(x.__name__ for x in fla_page.PARTS)
    # a process of its own: other tests import modules that the page would list
    made = run_code(ROOT / "tools/fla_page.py", "--check")
    assert made.returncode == 0, made.stderr


def test_changed_part_is_seen() -> None:
    changed = PAGE.replace("`chunk_gsa`", "`chunk_none`")
    assert changed != PAGE and "chunk_none" not in fla_page.written(changed)


def test_page_names_the_release_that_it_follows() -> None:
    version = slipstream.compat.fla.__version__
    assert f"fla-core {version}," in PAGE and f"flash-linear-attention=={version} " in PAGE


def test_page_names_the_layers_of_models_that_are_converted() -> None:
    """Mamba-3's came without its row."""
    pytest.importorskip("transformers")
    from slipstream.models import MIXERS
    from slipstream.models.convert import FAMILIES

    for mixer in MIXERS.keys() & FAMILIES.keys():
        assert re.search(rf"^\| `\w+` \| `\w+` \| `{mixer}` \|$", PAGE, re.M), mixer


SNAPSHOT_OTHERS = json.loads((Path(__file__).parent / "other_signatures.json").read_text())
# helpers of their kernels, and what the pages under docs/guides say is missing
MISSING_OTHERS = {
    "flash_attn.flash_attn_interface": ("maybe_contiguous", "round_multiple"),
    "flash_attn.layers.rotary": ("rotate_half",),
    "flash_attn.ops.triton.layer_norm": (
        "layer_norm_ref",
        "maybe_contiguous",
        "maybe_contiguous_lastdim",
        "rms_norm_ref",
        "triton_autotune_configs",
    ),
    "flash_attn_interface": (
        "get_scheduler_metadata",
        "maybe_contiguous",
        "round_multiple",
        "round_up_headdim",
        "setup_context",
    ),
    "mamba_ssm.ops.selective_scan_interface": ("rms_norm_forward",),
    "mamba_ssm.ops.triton.ssd_combined": (
        "ensure_stride",
        "init_to_zero",
        "mamba_conv1d_scan_ref",
        "mamba_split_conv1d_scan_ref",
        "selective_scan_bwd",
        "ssd_chunk_scan_combined_ref",
    ),
    "mamba_ssm.ops.triton.layernorm_gated": ("rms_norm_ref",),
    "mamba_ssm.ops.triton.layer_norm": ("config_prune", "layer_norm_ref", "rms_norm_ref"),
}
NAMES = [
    (module, name)
    for module, functions in SNAPSHOT_OTHERS.items()
    for name in functions
    if name.partition(".")[0] not in MISSING_OTHERS.get(module, ())
]


def member(module: str, name: str) -> Any:
    found = importlib.import_module(f"slipstream.compat.{module}")
    for part in name.split("."):
        found = getattr(found, part)
    return found


def parameters(text: str) -> dict[str, Any]:
    """Names and defaults, in order."""
    scope: dict[str, Any] = {}
    exec(f"def f({text}): ...", {"torch": None}, scope)
    return {p.name: p.default for p in inspect.signature(scope["f"]).parameters.values()}


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(x) for x in NAMES])
def test_has_the_peers_arguments(module: str, name: str) -> None:
    """In their order; those of ours alone come after them, by name only."""
    want = parameters(SNAPSHOT_OTHERS[module][name])
    ours = list(inspect.signature(member(module, name)).parameters.values())
    got = {p.name: p.default for p in ours if p.kind is not p.KEYWORD_ONLY}
    # not needed here, so that they may be left out
    optional = {x: None for x in got if x.startswith("max_seqlen") and want.get(x) is not None}
    assert list(got) == list(want)
    assert got == want | optional


@pytest.mark.parametrize("module", SNAPSHOT_OTHERS)
def test_missing_names_say_so(module: str) -> None:
    found = importlib.import_module(f"slipstream.compat.{module}")
    for name in MISSING_OTHERS.get(module, ()):
        with pytest.raises((ImportError, AttributeError), match=name):
            getattr(found, name)


# of which the libraries themselves have two
TWO_DEFAULTS = {
    ("fla.modules.layernorm_gated", "norm_before_gate"),
    ("mamba_ssm.ops.selective_scan_interface", "delta_softplus"),
}


def test_flags_of_a_module_have_one_default() -> None:
    """As classes and the functions that they call have."""
    defaults: dict[tuple[str, str], set[bool]] = {}
    for found in pkgutil.walk_packages(compat.__path__, f"{compat.__name__}."):
        module = importlib.import_module(found.name)
        own = [x for x in vars(module).values() if getattr(x, "__module__", "") == found.name]
        members = [y for x in own if inspect.isclass(x) for y in vars(x).values()]
        for function in filter(inspect.isfunction, [*own, *members]):
            for name, x in inspect.signature(function).parameters.items():
                if isinstance(x.default, bool):
                    where = found.name.removeprefix(f"{compat.__name__}."), name
                    defaults.setdefault(where, set()).add(x.default)
    assert {where for where, values in defaults.items() if len(values) > 1} == TWO_DEFAULTS
