"""The public interface as text: signatures, environment variables, commands.

    python tools/api_snapshot.py > tests/public_api.txt

tests/test_public_api.py compares it with that file, so that a change of the interface is a change
of the file, which a reviewer sees. Annotations are left out: they print differently by release.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from own_checkout import ROOT

MODULES = (
    "slipstream.ops",
    "slipstream.nn",
    "slipstream.layers",
    "slipstream.parallel",
    "slipstream.models",
    "slipstream.models.convert",
    "slipstream.integrations",
    "slipstream.integrations.transformers",
    "slipstream.integrations.sglang",
    "slipstream.integrations.vllm",
    "slipstream.compat",
)


def signature(member: Any) -> str:
    """The parameters of a function, or of a class's constructor, without annotations."""
    try:
        found = inspect.signature(member)
    except (TypeError, ValueError):
        return ""
    bare = [x.replace(annotation=inspect.Parameter.empty) for x in found.parameters.values()]
    text = str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def members(module: str) -> Iterator[str]:
    """Public names of a module; of a class its own public methods too."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [x for x in vars(found) if not x.startswith("_")]
    for name in sorted(names):
        member = getattr(found, name)
        if not (inspect.isclass(member) or inspect.isfunction(member)):
            continue
        if not member.__module__.startswith("slipstream"):
            continue
        yield f"{module}.{name}{signature(member)}"
        for method, value in sorted(vars(member).items()) if inspect.isclass(member) else ():
            if inspect.isfunction(value) and not method.startswith("_"):
                yield f"{module}.{name}.{method}{signature(value)}"


def variables() -> Iterator[str]:
    """Environment variables that the package reads."""
    files = [ROOT / "slipstream_plugins.py", *(ROOT / "slipstream").rglob("*.py")]
    text = "\n".join(x.read_text() for x in files)
    yield from sorted(set(re.findall(r"\bSLIPSTREAM_[A-Z_]+\b", text)))


def commands() -> Iterator[str]:
    """Every command with its arguments and options."""
    import typer.main

    from slipstream.cli.commands import app

    group: Any = typer.main.get_command(app)
    for name, command in sorted(group.commands.items()):
        yield f"slipstream {name}"
        for parameter in command.params:
            names = "/".join((*parameter.opts, *parameter.secondary_opts))
            yield f"    {parameter.param_type_name} {names} = {parameter.default!r}"


def snapshot() -> str:
    parts = (
        ("Python", (line for module in MODULES for line in members(module))),
        ("Environment variables", variables()),
        ("Commands", commands()),
    )
    return "\n".join("\n".join([f"# {title}", *lines, ""]) for title, lines in parts)


if __name__ == "__main__":
    print(snapshot(), end="")
