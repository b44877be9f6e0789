"""The package as pip sees it: version, metadata, extras, and what is said where one is missing."""

import ast
import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import slipstream
from slipstream.common import extras
from tests.support.forked import run_code
from tests.support.package import PROJECT, ROOT

# the name of a module -> the package that brings it, where they differ
PACKAGES = {"yaml": "pyyaml", "huggingface_hub": "transformers"}
WITHOUT = "import sys; sys.modules.update(dict.fromkeys({absent!r}))\n{code}"


def requirements(extra: str) -> set[str]:
    """Names of the packages that an extra brings, through the extras that it names."""
    found: set[str] = set()
    for line in PROJECT["optional-dependencies"][extra]:
        name = re.match(r"[\w.-]+", line)
        assert name
        inner = re.match(r"slipstream\[([\w,]+)\]", line)
        found |= {name[0]} if inner is None else set()
        for other in inner[1].split(",") if inner else ():
            found |= requirements(other)
    return found


def run_without(absent: tuple[str, ...], code: str) -> subprocess.CompletedProcess:
    return run_code(WITHOUT.format(absent=absent, code=code))


def test_package_version_is_that_of_pyproject() -> None:
    assert slipstream.__version__ == PROJECT["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## {PROJECT['version']}" in changelog


def test_package_urls_are_those_of_the_host_that_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = types.SimpleNamespace(MetadataHookInterface=object)  # of hatchling, which builds
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, plugin)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", plugin)
    monkeypatch.syspath_prepend(str(ROOT))
    urls = importlib.import_module("hatch_build").urls
    home = "https://host.test/owner/name"
    for environment in (
        {"SLIPSTREAM_REPOSITORY": home},
        {"GITHUB_SERVER_URL": "https://host.test", "GITHUB_REPOSITORY": "owner/name"},
    ):
        found = urls(environment)
        assert set(found) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
        assert all(x.startswith(home) for x in found.values())
    assert urls({}) == {} and urls({"GITHUB_SERVER_URL": "https://host.test"}) == {}


@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_plugins_do_nothing_unless_asked(
    group: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor do they bring down an engine that is not there, or not of a release that is known."""
    module, _, name = PROJECT["entry-points"][group]["slipstream"].partition(":")
    code = f"import sys, {module}\n{module}.{name}()\n"
    code += "assert not {'torch', 'slipstream', 'slipstream.integrations'} & {*sys.modules}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    engine = group.partition(".")[0]
    monkeypatch.setitem(sys.modules, engine, None)
    monkeypatch.setenv(f"SLIPSTREAM_{engine.upper()}", "1")
    getattr(importlib.import_module(module), name)()
    said = [x.getMessage() for x in caplog.records]
    assert said and all(f"slipstream.integrations.{engine}" in x for x in said)
    assert all("is not used: ModuleNotFoundError: " in x for x in said)


def test_package_is_typed() -> None:
    assert (Path(str(slipstream.__file__)).parent / "py.typed").exists()


def test_package_imports_are_declared() -> None:
    """Every third-party module that slipstream imports is a dependency or in an extra."""
    base = {re.split(r"[^\w-]", x)[0] for x in PROJECT["dependencies"]}
    declared = base | requirements("lm") | requirements("cuda") | requirements("data")
    undeclared = set()
    for path in (ROOT / "slipstream").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in {x.partition(".")[0] for x in names}:
                if name not in sys.stdlib_module_names and name != "slipstream":
                    package = PACKAGES.get(name, name)
                    undeclared |= set() if package in declared else {f"{path}: {name}"}
    assert not undeclared


def test_missing_extra_is_named() -> None:
    wanted = {
        "import slipstream.models": ("transformers", "lm"),
        "import slipstream.integrations.transformers": ("transformers", "interop"),
        "import slipstream.cli; slipstream.cli.main()": ("typer", "cli"),
    }
    code = "".join(
        f"try:\n    {x}\nexcept (ImportError, SystemExit) as error:\n    print(error)\n"
        for x in wanted
    )
    done = run_without(("transformers", "typer"), code)
    assert done.returncode == 0, done.stderr
    for line, (module, extra) in zip(done.stdout.splitlines(), wanted.values(), strict=True):
        assert module in line and line.endswith(f"pip install 'slipstream[{extra}]'")


@pytest.mark.parametrize(
    ("module", "what"),
    [
        ("tokenizers.models", "'slipstream[lm]'"),
        ("xxhash._x", "xxhash"),
        ("yaml", "'slipstream[cli]'"),
    ],
)
def test_missing_module_is_named_with_what_brings_it(module: str, what: str) -> None:
    """One that no extra has, such as a dependency of wandb, by itself."""
    error = extras.missing("the command", ModuleNotFoundError(name=module))
    name = module.partition(".")[0]
    text = f"the command needs {name}, which is not installed: pip install {what}"
    assert str(error) == text


@pytest.mark.parametrize("command", ["explain kda", "precompile kda --arch sm_90"])
def test_commands_about_kernels_name_the_extra_of_triton(command: str) -> None:
    code = f"import sys; sys.argv[1:] = {command.split()!r}; import slipstream.cli as c; c.main()"
    done = run_without(("triton",), code)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.endswith(
        "needs triton, which is not installed: pip install 'slipstream[cuda]'\n"
    )
    assert len(done.stderr.splitlines()) == 1


def test_operators_need_torch_alone() -> None:
    """import, one operator and its gradient without any extra, and without numpy."""
    extras = requirements("lm") | requirements("cuda") | {"yaml"}
    code = (
        "import torch, slipstream\n"
        "q, k, v = (torch.randn(1, 40, 2, 8, requires_grad=True) for _ in range(3))\n"
        "o, _ = slipstream.ops.chunk_retention(q, k, v)\n"
        "o.sum().backward()\n"
        "assert q.grad.isfinite().all()\n"
    )
    # a new process: torch shall do without them, too
    script = WITHOUT.format(absent=tuple(sorted(extras - {"torch", "filelock"})), code=code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


COUNT = """
import gc, sys, time
sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False
gc.collect()  # what torch has left to collect is not ours
start = time.process_time()
import slipstream
print(time.process_time() - start)
print([name for name in ("triton", "transformers", "numpy.testing") if name in sys.modules])
"""


def test_import_is_light_and_quick(tmp_path: Path) -> None:
    """Best of three, as installed: neither triton nor transformers, and beyond torch less than 0.3
    s of a processor, which others on the machine do not lengthen as they do a wait. A process
    before them writes bytecode, as installing does: an import does not cost the compiling of over
    a hundred files, and where these tests run nothing may have been written."""
    seconds = []
    for _ in range(4):
        done = run_code(COUNT, tmp_path)  # torch is there
        assert done.returncode == 0, done.stderr
        out = done.stdout.splitlines()
        assert out[1] == "[]"
        seconds.append(float(out[0]))
    assert min(seconds[1:]) < 0.3
