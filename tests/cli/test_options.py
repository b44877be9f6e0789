"""Every option of every command reaches what it is an option of, whose work is left out here."""

import ast
import inspect
import json
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from slipstream.cli.commands import app
from slipstream.tools.catalog import QUICK_OPERATORS

Given = dict[str, Any]


@dataclass
class Ran:
    """What functions were called with, by name, and what was printed."""

    folder: Path
    calls: dict[str, Given] = field(default_factory=dict)
    output: str = ""

    def __getitem__(self, name: str) -> Given:
        return self.calls[name]

    def __contains__(self, name: str) -> bool:
        return name in self.calls


# an option, words of it, {} in them is a folder, and what a function gets with it alone
TABLE = """
train --fresh            --fresh              train fresh True
generate --batch         --batch 3            generate batch 3
generate --file          --file {}/lines      generate prompts ['a', 'b']
generate --tokens        --tokens 7           generate tokens 7
generate --temperature   --temperature 0.5    generate temperature 0.5
generate --top-p         --top-p 0.25         generate top_p 0.25
generate --seed          --seed 9             generate seed 9
convert --to             --to mamba2          convert to 'mamba2'
convert --ignore         --ignore x --ignore y  convert ignore ['x', 'y']
doctor --full            --full               examine full True
explain --arch           --arch sm_80         lines arch 'sm_80'
explain --dtype          --dtype fp32         parse_shape dtype 'fp32'
explain --shape          --shape T=99         parse_shape text 'T=99'
explain --packed         --packed             flags packed True
explain --state          --state              flags state True
explain --grouped        --grouped            flags grouped True
explain --flags          --flags              lines flags True
precompile --head-dim    --head-dim 64,32x48  shapes widths ['64', '32x48']
precompile --batch       --batch 2x32         batch text '2x32'
precompile --packed      --packed             flags packed True
precompile --state       --no-state           flags state False
precompile --grouped     --grouped            flags grouped True
precompile --forward     --forward            find_operators backward False
precompile --jobs        --jobs 4             fill jobs 4
"""
COMMANDS = {
    "train": "train {}/run.yaml",
    "generate": "generate run --file {}/lines",
    "generate --file": "generate run",
    "generate --tokens": "generate run a",
    "convert": "convert a b",
    "explain": "explain kda",
    "precompile": "precompile rms_norm",
}


def _gets(function: str, name: str, value: Any) -> Callable[[Ran], bool]:
    def holds(ran: Ran) -> bool:
        if function != "flags":
            return ran[function][name] == value
        flags = (ran["shapes"] if "shapes" in ran else ran["parse_shape"])["flags"]
        return (flags[name] if isinstance(flags, dict) else getattr(flags, name)) is value

    return holds


OPTIONS: dict[str, tuple[str, Callable[[Ran], bool]]] = {}
for line in TABLE.strip().splitlines():
    option, words, wanted = re.split("  +", line, maxsplit=2)
    function, argument, expected = wanted.split(" ", 2)
    OPTIONS[option] = words, _gets(function, argument, ast.literal_eval(expected))
OPTIONS |= {
    "doctor --json": ("--json", lambda ran: json.loads(ran.output)["checks"] == []),
    "doctor --quick": (
        "--quick",
        lambda ran: {x.op for x in ran["examine"]["samples"]} == {*QUICK_OPERATORS},
    ),
    "doctor --checks": ("--no-checks", lambda ran: "examine" not in ran),
    "doctor --interpreted": (
        "--no-interpreted",
        lambda ran: "examine" in ran and "interpreted" not in ran,
    ),
    "doctor --thorough": (
        "--thorough",
        lambda ran: (
            ran["examine"]["thorough"] is True
            and ran["interpreted"]["samples"] == ran["examine"]["samples"]
        ),
    ),
    "doctor --forget": ("--forget", lambda ran: "clear_verdicts" in ran),
    "precompile --arch": (
        "--arch sm_80",
        lambda ran: ran["fill"]["arch"] == "sm_80" == ran["find_operators"]["arch"],
    ),
    "precompile --dtype": (
        "--dtype fp32",
        lambda ran: [str(x) for x in ran["shapes"]["dtypes"]] == ["torch.float32"],
    ),
    "precompile --cache": ("--cache {}", lambda ran: ran["fill"]["cache"] == ran.folder),
}

# what does the work, and what it gives
WORKERS: dict[str, Any] = {
    "slipstream.cli.commands.need_triton": None,
    "slipstream.training.config.load": SimpleNamespace(),
    "slipstream.training.run.train": SimpleNamespace(held_out=None, step=1),
    "slipstream.training.sample.load": ("model", "tokenizer"),
    "slipstream.training.sample.generate": 1.0,
    "slipstream.models.convert.convert": SimpleNamespace(
        source="a", target="b", parameters=1, weight_bytes=1
    ),
    "slipstream.runtime.guarded_launch.clear_verdicts": None,
    "slipstream.tools.doctor_checks.about": {"device": None},
    "slipstream.tools.doctor_checks.show": None,
    "slipstream.tools.doctor_checks.show_headings": None,
    "slipstream.tools.doctor_checks.examine": [],
    "slipstream.tools.doctor_checks.interpreted": [],
    "slipstream.tools.explain_text.parse_shape": "shape",
    "slipstream.tools.explain_text.lines": ["a line"],
    "slipstream.tools.precompile_cache.batch": (1, 2),
    "slipstream.tools.precompile_cache.shapes": [],
    "slipstream.tools.precompile_cache.find_operators": None,
}


def fill(find: Callable[[], Any], what: str, arch: str, cache: Path | None, jobs: int) -> bool:
    find()
    return True


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ran:
    found = Ran(tmp_path)

    def record(path: str, does: Callable[..., Any]) -> None:
        signature = inspect.signature(pkgutil.resolve_name(path))

        def recorded(*args: Any, **named: Any) -> Any:
            bound = signature.bind(*args, **named)
            bound.apply_defaults()
            found.calls[path.rpartition(".")[2]] = bound.arguments
            return does(*args, **named)

        monkeypatch.setattr(path, recorded)

    for path, gives in WORKERS.items():
        record(path, lambda *_, gives=gives, **__: gives)
    record("slipstream.tools.precompile_cache.fill", fill)
    (tmp_path / "lines").write_text("a\n\nb\n")
    (tmp_path / "run.yaml").write_text("{}")
    return found


def _options() -> set[str]:
    group: Any = typer.main.get_command(app)
    return {
        f"{name} {option.opts[0]}"
        for name, command in group.commands.items()
        for option in command.params
        if option.param_type_name == "option"
    }


def test_every_option_is_in_the_table() -> None:
    assert _options() == {*OPTIONS}


def _holds(name: str, words: str, ran: Ran, exit_codes: tuple[int, ...]) -> bool:
    ran.calls.clear()
    command = COMMANDS.get(name) or COMMANDS.get(name.split()[0], name.split()[0])
    done = CliRunner().invoke(app, [x.format(ran.folder) for x in f"{command} {words}".split()])
    assert done.exit_code in exit_codes, done.output
    ran.output = done.output
    try:
        return OPTIONS[name][1](ran)
    except (KeyError, OSError, json.JSONDecodeError):  # not called, not written
        return False


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_option_reaches_its_function(name: str, ran: Ran) -> None:
    assert not _holds(name, "", ran, (0, 2))
    assert _holds(name, OPTIONS[name][0], ran, (0,)), (ran.calls, ran.output)
