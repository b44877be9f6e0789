"""Writes the pages of docs/api that follow from the code: python tools/reference.py

Operators, modules, layers, models, the keys of a training config, environment variables and the
commands. docs/conf.py calls it before every build; git does not keep what it writes.
"""

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import api_snapshot

# group of slipstream.ops -> its modules; a public function of another module fails the build
GROUPS = {
    "Linear attention, chunk and recurrent form": (
        "linear_attn simple_gla gla rwkv gsa hgrn delta_rule gated_delta_product kda "
        "dplr_delta_rule"
    ),
    "Decoding with a pool of states": "steps prefix_states",
    "State-space models": "mamba",
    "Softmax attention": "attention flash_attn indexer",
    "Normalisation": "norm attnres",
    "Residual streams": "hyper_connection",
    "Convolution and token shift": "conv causal_conv1d token_shift",
    "Prefix trees": "prefix_tree",
    "Positions and embedding": "rotary embedding",
    "Activations": "activation",
    "Losses": "loss",
    "Matrix product": "matmul config",
}
MODULES = {
    "nn": ("slipstream.nn", "Modules whose arguments and parameter names are those of torch.nn."),
    "layers": ("slipstream.layers", "Layers that mix tokens, [B, T, D] to [B, T, D]."),
    "models": ("slipstream.models", "The language model. Needs the extra `lm`."),
    "convert": ("slipstream.models.convert", "Checkpoints of others. Needs the extra `lm`."),
    "compat": (
        "slipstream.compat",
        "Other packages' names for these functions: the migration guides say what each has.",
    ),
    "parallel": ("slipstream.parallel", "A batch whose tokens are divided among several GPUs."),
}
VARIABLES = {
    "SLIPSTREAM_AHEAD": (
        "`on` or `1`, `off` or `0`",
        "`on`",
        "Whether an operator's kernels of other sizes are compiled in the background after its "
        "first call. Read at import.",
    ),
    "SLIPSTREAM_CACHE_DIR": (
        "a folder",
        "`$XDG_CACHE_HOME/slipstream`, or `~/.cache/slipstream`",
        "Where verdicts about compilers and the rows of `tools/matrix.py` are stored.",
    ),
    "SLIPSTREAM_CHECK": (
        "`sync`, or empty",
        "empty",
        "`sync` makes every call on CUDA wait for the device and report a token id outside the "
        "vocabulary at once, instead of at the next call. Read at import.",
    ),
    "SLIPSTREAM_FALLBACK": (
        "`warn`, `error`",
        "`warn`",
        "What happens when a call on a GPU has to run in plain torch: one `FallbackWarning` per "
        "family and reason, or `NotImplementedError`.",
    ),
    "SLIPSTREAM_GUARD": (
        "`auto`, `off`, `always`",
        "`auto`",
        "Whether the first compilation of a kernel happens in a child process. `auto`: only for "
        "combinations of compilers and GPU that the support matrix has not verified.",
    ),
    "SLIPSTREAM_PROBE": (
        "`once`, `always`, `off`",
        "`once`",
        "Whether the first use of a kernel is compared with plain torch on a small problem. "
        "`once`: on unverified combinations, remembered on disk. `always`: once in every process.",
    ),
    "SLIPSTREAM_REPLAY": (
        "`on` or `1`, `off` or `0`",
        "`on`",
        "Whether repeated calls with the same shapes replay a recorded launch sequence. Read at "
        "import.",
    ),
    "SLIPSTREAM_SGLANG": (
        "`0`, `1`",
        "`0`",
        "Whether SGLang gets slipstream's kernels where it calls its plugins: "
        ":doc:`/guides/serving`.",
    ),
    "SLIPSTREAM_VLLM": (
        "`0`, `1`",
        "`0`",
        "Whether vLLM gets slipstream's kernels where it calls its plugins: "
        ":doc:`/guides/serving`.",
    ),
}
SECTIONS = {
    "output_dir": "the run's directory",
    "model": "`slipstream.models.SlipstreamConfig`, by name",
    "tokenizer": "the tokenizer",
    "data": "the text",
    "training": "`transformers.TrainingArguments`, by name",
    "init_from": "a saved model or run to begin with, instead of new weights",
    "parallel": "how the processes of torchrun share the work",
}


def heading(title: str, mark: str = "=") -> list[str]:
    return [title, mark * len(title), ""]


def public(module: str) -> Iterator[tuple[str, Any]]:
    """Public functions and classes, as tests/public_api.txt has them."""
    found = importlib.import_module(module)
    for name in sorted(getattr(found, "__all__", vars(found))):
        member = getattr(found, name)
        home = getattr(member, "__module__", "")
        elsewhere = any(home.startswith(f"{x}.") for x, _ in MODULES.values() if x != module)
        if home.startswith("slipstream") and not name.startswith("_") and not elsewhere:
            yield name, member


def autosummary(module: str, names: list[str]) -> list[str]:
    lines = [f".. currentmodule:: {module}", "", ".. autosummary::", "   :toctree: generated", ""]
    return [*lines, *(f"   {name}" for name in names), ""]


def operators() -> list[str]:
    lines = [*heading("slipstream.ops"), "Functions. One page each.", ""]
    groups: dict[str, list[str]] = {name: [] for name in GROUPS}
    group_of = {module: name for name, modules in GROUPS.items() for module in modules.split()}
    for name, member in public("slipstream.ops"):
        module = member.__module__.rpartition(".")[2]
        if module not in group_of:
            raise ValueError(f"slipstream.ops.{name}: add {module} to GROUPS of tools/reference.py")
        groups[group_of[module]].append(name)
    for title, names in groups.items():
        lines += [*heading(title, "-"), *autosummary("slipstream.ops", names)]
    return lines


def classes(module: str, text: str) -> list[str]:
    names = [name for name, _ in public(module)]
    return [*heading(module), text.replace("`", "``"), "", *autosummary(module, names)]


def keys(cls: Any) -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, meaning); the meaning is from the class's docstring."""
    meanings = docstring_items(inspect.getdoc(cls) or "")
    hints = inspect.get_annotations(cls)
    for field in (x for x in fields(cls) if x.name in hints):  # its own, not inherited ones
        hint = hints[field.name]
        kind = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
        if field.name not in meanings:
            raise ValueError(f"{cls.__name__}.{field.name}: has no line in the class's docstring")
        yield field.name, kind, default_of(field), meanings[field.name]


def default_of(field: Field) -> str:
    if field.default is not MISSING:
        return repr(field.default)
    return "required" if field.default_factory is MISSING else repr(field.default_factory())


def docstring_items(text: str) -> dict[str, str]:
    """Lines "name: meaning", continued by indented ones."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        head, colon, rest = line.strip().partition(": ")
        if colon and head.isidentifier() and head not in ("Args", "Raises", "Returns"):
            name = head
            found[name] = rest
        elif name and line.startswith("    "):
            found[name] += f" {line.strip()}"
        elif not line.strip():
            name = ""
    return found


def table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = [".. list-table::", "   :header-rows: 1", "   :class: reference", ""]
    for row in (headings, *rows):
        lines += [f"   {'* -' if not i else '  -'} {cell}" for i, cell in enumerate(row)]
    return [*lines, ""]


def code(text: str) -> str:
    return f"``{text}``" if text else ""


def training_config() -> list[str]:
    from slipstream.models import SlipstreamConfig
    from slipstream.training import config, run

    lines = heading("Keys of a training config")
    lines += [
        "``slipstream train CONFIG.yaml [section.key=value ...]`` reads a YAML file with these",
        "sections. An unknown key is an error that names the nearest known key.",
        "",
    ]
    own = {"model": SlipstreamConfig, "tokenizer": config.Tokenizer, "data": config.Data}
    own |= {"parallel": config.Parallel}
    for name in (field.name for field in fields(config.RunConfig)):
        about = SECTIONS[name]
        lines += [*heading(name, "-"), rst(about[:1].upper() + about[1:]) + ".", ""]
        if name == "training":
            lines += ["Defaults that differ from those of transformers:", ""]
            rows = [(code(key), code(repr(value))) for key, value in run.DEFAULTS.items()]
            lines += table(("key", "default"), rows)
            lines += ["Options that are refused, and why:", ""]
            rows = [(code(key), rst(why)) for key, why in run.UNUSED.items()]
            lines += table(("key", "reason"), rows)
        elif name in own:
            rows = [
                (code(key), rst(kind), code(default), rst(meaning))
                for key, kind, default, meaning in keys(own[name])
            ]
            lines += table(("key", "type", "default", "meaning"), rows)
    return lines


def rst(text: str) -> str:
    """Plain text with `code` in backticks, nothing else interpreted."""
    parts = text.split("`")
    plain = "\\"
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = f"``{part}``"
        else:
            parts[i] = "".join(plain + x if x in "*_|\\" else x for x in part)
    return "".join(parts)


def environment() -> list[str]:
    read = set(api_snapshot.variables())
    if read != set(VARIABLES):
        differ = ", ".join(sorted(read ^ set(VARIABLES)))
        raise ValueError(f"VARIABLES of tools/reference.py: differs from the code in {differ}")
    lines = [*heading("Environment variables"), "Variables that Slipstream reads.", ""]
    rows = [(code(name), *map(rst, about)) for name, about in sorted(VARIABLES.items())]
    lines += table(("variable", "values", "default", "effect"), rows)
    lines += ["Variables of Triton that matter here:", ""]
    rows = [
        (code("TRITON_CACHE_DIR"), "Where Triton stores compiled kernels."),
        (code("TRITON_PTXAS_PATH"), "The ptxas in use; see :doc:`/tools/doctor`."),
        (code("TRITON_INTERPRET=1"), "Runs the kernels in Triton's interpreter on a CPU."),
    ]
    return lines + table(("variable", "effect"), rows)


def commands() -> list[str]:
    import typer.main

    from slipstream.cli.commands import app

    group: Any = typer.main.get_command(app)
    lines = heading("Command line")
    lines += [
        "``slipstream COMMAND``, or ``python -m slipstream COMMAND``. Needs the extra ``cli``;",
        "``train`` and ``generate`` need ``lm``. Every command has ``--help``.",
        "",
    ]
    for name, command in sorted(group.commands.items()):
        lines += [*heading(f"slipstream {name}", "-"), rst(inspect.cleandoc(command.help)), ""]
        rows = []
        for parameter in command.params:
            names = "/".join((*parameter.opts, *parameter.secondary_opts))
            if parameter.param_type_name == "argument":
                names = parameter.name.upper() + (" ..." if parameter.nargs == -1 else "")
            default = parameter.default
            shown = "" if default in (None, "", False) or parameter.required else str(default)
            rows.append((code(names), code(shown), rst(parameter.help or "")))
        lines += table(("argument", "default", "meaning"), rows)
    return lines


def package() -> list[str]:
    return [*heading("slipstream"), *autosummary("slipstream", ["synchronize"])]


def integrations() -> list[str]:
    lines = heading("slipstream.integrations")
    lines += ['``transformers`` registers ``attn_implementation="slipstream"`` when imported:']
    lines += [":doc:`/guides/transformers`. The others have what these engines call:"]
    lines += [":doc:`/guides/serving`.", ""]
    lines += autosummary("slipstream.integrations", ["report"])
    for name in ("transformers", "sglang", "vllm"):
        module = f"slipstream.integrations.{name}"
        lines += autosummary(module, [x for x, _ in public(module)])
    return lines


def write(folder: Path) -> None:
    """Files whose text is the same are left alone, so that a second build is quick; pages of
    functions that are gone are deleted."""
    pages = {
        "slipstream": package(),
        "ops": operators(),
        **{name: classes(*about) for name, about in MODULES.items()},
        "integrations": integrations(),
        "training-config": training_config(),
        "environment": environment(),
        "cli": commands(),
    }
    listed = {
        f"{module}.{name}.rst" for module in api_snapshot.MODULES for name, _ in public(module)
    }
    for path in (folder / "generated").glob("*.rst"):
        if path.name not in (*listed, "slipstream.synchronize.rst"):
            path.unlink()
    for name, lines in pages.items():
        path, text = folder / f"{name}.rst", "\n".join(lines) + "\n"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    write(Path(__file__).parents[1] / "docs" / "api")
