"""Every option of every command reaches what it is an option of, whose work is left out here."""

import inspect
import json
import pkgutil
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


@dataclass(frozen=True)
class Option:
    """A command, an option of it, {} in them is a folder, and what holds only with the option."""

    command: str
    words: str
    holds: Callable[[Ran], bool]


def _of_generate(option: str, name: str, value: Any) -> Option:
    return Option("generate run a", option, lambda ran: ran["generate"][name] == value)


def _of_doctor(option: str, holds: Callable[[Ran], bool]) -> Option:
    return Option("doctor", option, holds)


def _of_explain(option: str, function: str, name: str, value: Any) -> Option:
    """`flags` of parse_shape are those of the call."""

    def holds(ran: Ran) -> bool:
        given = ran[function]
        return (given["flags"] if function == "parse_shape" and name not in given else given)[
            name
        ] == value

    return Option("explain kda", option, holds)


def _of_precompile(option: str, holds: Callable[[Ran], bool]) -> Option:
    return Option("precompile rms_norm", option, holds)


def _flag(name: str, value: bool) -> Callable[[Ran], bool]:
    return lambda ran: getattr(ran["shapes"]["flags"], name) is value


OPTIONS = {
    "train --fresh": Option(
        "train {}/run.yaml", "--fresh", lambda ran: ran["train"]["fresh"] is True
    ),
    "generate --file": Option(
        "generate run", "--file {}/lines", lambda ran: ran["generate"]["prompts"] == ["a", "b"]
    ),
    "generate --batch": Option(
        "generate run --file {}/lines", "--batch 3", lambda ran: ran["generate"]["batch"] == 3
    ),
    "generate --tokens": _of_generate("--tokens 7", "tokens", 7),
    "generate --temperature": _of_generate("--temperature 0.5", "temperature", 0.5),
    "generate --top-p": _of_generate("--top-p 0.25", "top_p", 0.25),
    "generate --seed": _of_generate("--seed 9", "seed", 9),
    "convert --to": Option(
        "convert a b", "--to mamba2", lambda ran: ran["convert"]["to"] == "mamba2"
    ),
    "convert --ignore": Option(
        "convert a b", "--ignore x --ignore y", lambda ran: ran["convert"]["ignore"] == ["x", "y"]
    ),
    "doctor --json": _of_doctor("--json", lambda ran: json.loads(ran.output)["checks"] == []),
    "doctor --full": _of_doctor("--full", lambda ran: ran["examine"]["full"] is True),
    "doctor --quick": _of_doctor(
        "--quick", lambda ran: {x.op for x in ran["examine"]["samples"]} == {*QUICK_OPERATORS}
    ),
    "doctor --checks": _of_doctor("--no-checks", lambda ran: not {*ran.calls} & {"examine"}),
    "doctor --interpreted": _of_doctor(
        "--no-interpreted", lambda ran: "examine" in ran and "interpreted" not in ran
    ),
    "doctor --thorough": _of_doctor(
        "--thorough",
        lambda ran: (
            ran["examine"]["thorough"] is True
            and ran["interpreted"]["samples"] == ran["examine"]["samples"]
        ),
    ),
    "doctor --forget": _of_doctor("--forget", lambda ran: "clear_verdicts" in ran),
    "explain --arch": _of_explain("--arch sm_80", "lines", "arch", "sm_80"),
    "explain --dtype": _of_explain("--dtype fp32", "parse_shape", "dtype", "fp32"),
    "explain --shape": _of_explain("--shape T=99", "parse_shape", "text", "T=99"),
    "explain --packed": _of_explain("--packed", "parse_shape", "packed", True),
    "explain --state": _of_explain("--state", "parse_shape", "state", True),
    "explain --grouped": _of_explain("--grouped", "parse_shape", "grouped", True),
    "explain --flags": _of_explain("--flags", "lines", "flags", True),
    "precompile --arch": _of_precompile(
        "--arch sm_80", lambda ran: ran["fill"]["arch"] == "sm_80" == ran["find_operators"]["arch"]
    ),
    "precompile --dtype": _of_precompile(
        "--dtype fp32", lambda ran: [str(x) for x in ran["shapes"]["dtypes"]] == ["torch.float32"]
    ),
    "precompile --head-dim": _of_precompile(
        "--head-dim 64,32x48", lambda ran: ran["shapes"]["widths"] == ["64", "32x48"]
    ),
    "precompile --batch": _of_precompile(
        "--batch 2x32", lambda ran: ran["batch"]["text"] == "2x32"
    ),
    "precompile --packed": _of_precompile("--packed", _flag("packed", True)),
    "precompile --state": _of_precompile("--no-state", _flag("state", False)),
    "precompile --grouped": _of_precompile("--grouped", _flag("grouped", True)),
    "precompile --forward": _of_precompile(
        "--forward", lambda ran: ran["find_operators"]["backward"] is False
    ),
    "precompile --cache": _of_precompile(
        "--cache {}", lambda ran: ran["fill"]["cache"] == ran.folder
    ),
    "precompile --jobs": _of_precompile("--jobs 4", lambda ran: ran["fill"]["jobs"] == 4),
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


def _holds(option: Option, words: str, ran: Ran, exit_codes: tuple[int, ...]) -> bool:
    ran.calls.clear()
    ran.output = ""
    for command in option.command.splitlines():
        line = [x.format(ran.folder) for x in f"{command} {words}".split()]
        done = CliRunner().invoke(app, line)
        assert done.exit_code in exit_codes, done.output
        ran.output += done.output
    try:
        return option.holds(ran)
    except (KeyError, OSError, json.JSONDecodeError):  # not called, not written
        return False


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_option_reaches_its_function(name: str, ran: Ran) -> None:
    option = OPTIONS[name]
    assert not _holds(option, "", ran, (0, 2))
    assert _holds(option, option.words, ran, (0,)), (ran.calls, ran.output)
