"""Runs a peer's own tests on slipstream.compat's module of its name.

    git clone https://github.com/Dao-AILab/causal-conv1d
    python tools/peer_suites.py causal-conv1d                all of SUITES, on a GPU if there is one
    python tools/peer_suites.py causal-conv1d --sample 200   so many cases of each file
    python tools/peer_suites.py mamba --only test_ssd --csv bench/results/peer_suites.csv

CHECKOUT is a clone of causal-conv1d, flash-attention, flash-linear-attention or mamba. Test
files are taken as they are, but that

- references (selective_scan_ref, naive_kda) and other names that slipstream.compat does not have
  come from the checkout where they are plain torch; a test that calls another such name is skipped,
- without a GPU "cuda" in them is "cpu".

Each file is a process of pytest, or --processes of them, without the peers' own configuration.
Printed are counts, the tests that fail, with the first line of why, and why cases were skipped.
Needs pytest and einops; fla's tests of layers and models also its files
(tests/compat/test_fla_interop.py says which).
"""

import argparse
import ast
import csv
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from table_specs import OMITTED

# by package: where tests are of what slipstream.compat has
SUITES = {
    "causal_conv1d": ("tests/test_causal_conv1d.py",),
    "flash_attn": (
        "tests/test_flash_attn.py", "tests/test_rotary.py", "tests/losses/test_cross_entropy.py",
        "tests/ops/triton/test_layer_norm.py",
    ),
    "mamba_ssm": (
        "tests/ops/test_selective_scan.py", "tests/ops/triton/test_layernorm_gated.py",
        "tests/ops/triton/test_selective_state_update.py", "tests/ops/triton/test_ssd.py",
        "tests/ops/triton/test_mamba3_siso.py", "tests/modules/test_mamba3_varlen.py",
    ),
    "fla": (
        "tests/ops/test_*.py", "tests/modules/test_*.py", "tests/layers/test_*.py",
        "tests/models/test_modeling_*.py",
    ),
}  # fmt: skip
# whose functions a peer's own files call
OTHERS = {"fla": ("causal_conv1d", "mamba_ssm"), "mamba_ssm": ("causal_conv1d",)}
COLUMNS: tuple[str, ...] = (
    "date",
    "device",
    "torch",
    "package",
    "commit",
    "file",
    "cases",
    "passed",
    "failed",
)
COLUMNS += ("skipped", "seconds")
CHECKOUT = "SLIPSTREAM_PEER_CHECKOUT"
_RUN = (ast.Import, ast.ImportFrom, ast.Try, ast.FunctionDef, ast.Assign)


class _Rewrite(ast.NodeTransformer):
    """Imports of a peer's names as calls of `wanted`; "cuda" as the device there is.

    package: which the file is in; "" of a test, whose relative imports are of files beside it.
    """

    def __init__(self, package: str = "") -> None:
        self.package = package

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        module = node.module or ""
        if node.level and not self.package:
            return ast.ImportFrom(node.module, node.names, 0)
        if node.level:
            parts = self.package.split(".")
            module = ".".join([*parts[: len(parts) - node.level + 1], module]).rstrip(".")
        if module.partition(".")[0] not in SUITES:
            return node
        lines = [
            f"{x.asname or x.name} = __import__('peer_suites').wanted({module!r}, {x.name!r})"
            for x in node.names
        ]
        return ast.parse("\n".join(lines)).body

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if node.value == "cuda" and not torch.cuda.is_available():
            return ast.Constant("cpu")
        return node


def rewritten(path: Path, package: str = "") -> ast.Module:
    tree = ast.parse(path.read_text("utf-8"))
    return ast.fix_missing_locations(_Rewrite(package).visit(tree))


def wanted(module: str, name: str) -> Any:
    """A peer's name: slipstream.compat's, or the checkout's where that is plain torch."""
    if (module, name) == ("fla.utils", "device"):
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "FLA_CACHE_MODE":  # of fla's tiles, by which its tests leave cases out
        return SimpleNamespace(uses_default_config=lambda: False)
    if is_reference(name) and name in plain(module):
        return plain(module)[name]
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return plain(module).get(name) or _skips(f"{module}.{name}")


def is_reference(name: str) -> bool:
    return name.endswith("_ref") or name.startswith("naive_")


def _skips(name: str) -> Callable[..., None]:
    def skip(*_: Any, **__: Any) -> None:
        import pytest

        if "PYTEST_CURRENT_TEST" in os.environ:  # else of a condition as the file is imported
            pytest.skip(f"slipstream.compat has no {name}")

    return skip


@cache
def plain(module: str) -> dict[str, Any]:
    """Names of a checkout's module that run by themselves: imports that there are, constants,
    functions that run as they stand and launch no kernels; but slipstream.compat's functions,
    where it has one that is no reference."""
    base = Path(os.environ[CHECKOUT], *module.split("."))
    path = next((x for x in (base.with_suffix(".py"), base / "__init__.py") if x.exists()), None)
    try:
        ours = vars(importlib.import_module(module))
    except ImportError:
        ours = {}
    names: dict[str, Any] = {"__name__": module}
    package = module if path and path.stem == "__init__" else module.rpartition(".")[0]
    for statement in rewritten(path, package).body if path else ():
        if isinstance(statement, ast.FunctionDef):
            name = statement.name
            if name in ours and not is_reference(name):
                names[name] = ours[name]
                continue
            if not _is_plain(statement):
                names[name] = _skips(f"{module}.{name}")
                continue
        if isinstance(statement, _RUN):
            try:
                exec(compile(ast.Module([statement], []), str(path), "exec"), names)
            except Exception:  # of a part that is not plain torch, which nobody asks for then
                continue
    return names


def _is_plain(function: ast.FunctionDef) -> bool:
    calls = (x.func for x in ast.walk(function) if isinstance(x, ast.Call))
    decorators = {ast.unparse(x) for x in function.decorator_list} - {"torch.compiler.disable"}
    return not decorators and not any(isinstance(x, ast.Subscript) for x in calls)


def beside(path: Path) -> set[Path]:
    """Files of its folder that it imports, and those that these import."""
    imports = (x for x in ast.walk(ast.parse(path.read_text("utf-8"))) if type(x) is ast.ImportFrom)
    found = {path.with_name(f"{x.module}.py") for x in imports if x.level == 1}
    return found.union(*map(beside, found))


# as pytest's plugin


def pytest_configure() -> None:
    import own_checkout  # noqa: F401

    import slipstream.compat

    slipstream.compat.install(*os.environ["SLIPSTREAM_PEERS"].split(","))
    if not torch.cuda.is_available():
        for name in ("synchronize", "manual_seed_all", "manual_seed", "empty_cache"):
            setattr(torch.cuda, name, lambda *_: None)
        torch.cuda.get_device_capability = lambda *_: (9, 0)
        torch.cuda.is_bf16_supported = lambda *_, **__: True


def pytest_collection_modifyitems(items: list[Any]) -> None:
    count = int(os.environ["SLIPSTREAM_PEER_SAMPLE"])
    if count and len(items) > count:
        items[:] = [items[i * len(items) // count] for i in range(count)]
    first, step = map(int, os.environ["SLIPSTREAM_PEER_SHARE"].split("/"))
    items[:] = items[first::step]


_FOUND: Counter[str] = Counter()
_FAILED: list[str] = []
_WHY_SKIPPED: Counter[str] = Counter()


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        _FOUND[report.outcome] += 1
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = str(crash.message if crash else report.longrepr).strip().splitlines()
        _FAILED.append(f"{report.nodeid.partition('::')[2]}: {why[0][:160] if why else ''}")
    if report.skipped and isinstance(report.longrepr, tuple):
        _WHY_SKIPPED[str(report.longrepr[2]).removeprefix("Skipped: ")[:160]] += 1
    # after each: a file may run out of time
    Path(os.environ["SLIPSTREAM_PEER_FOUND"]).write_text(
        json.dumps([_FOUND, _FAILED, _WHY_SKIPPED])
    )


def run_file(
    checkout: Path, package: str, path: Path, sample: int, seconds: float, processes: int = 1
) -> Counter[str]:
    """Counts of one file's tests."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        for file in (path, *beside(path)):
            Path(folder, file.name).write_text(ast.unparse(rewritten(file)), "utf-8")
        tools = Path(__file__).parent
        packages = {package, *OTHERS.get(package, ())}
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(tools.parent), str(tools), *sys.path[1:]]),
            "SLIPSTREAM_PEERS": ",".join(sorted(packages)),
            "SLIPSTREAM_PEER_SAMPLE": str(sample),
            CHECKOUT: str(checkout),
        }
        with ThreadPoolExecutor(processes) as pool:
            shares = [f"{i}/{processes}" for i in range(processes)]
            return sum(
                pool.map(lambda x: run_share(copy, environment, x, seconds), shares), Counter()
            )


def run_share(copy: Path, environment: dict[str, str], share: str, seconds: float) -> Counter[str]:
    """Counts of the cases i, i + n, i + 2 n ... of a file. share: "i/n"."""
    found = copy.with_name(f"found {share.replace('/', ' of ')}.json")
    options = f"-q -p peer_suites -p no:cacheprovider --tb=short -W ignore -rN -c {os.devnull}"
    command = [sys.executable, "-m", "pytest", *options.split(), "--rootdir", str(copy.parent)]
    own = {"SLIPSTREAM_PEER_SHARE": share, "SLIPSTREAM_PEER_FOUND": str(found)}
    try:
        run = subprocess.run(
            [*command, str(copy)],
            env=environment | own,
            cwd=copy.parent,
            timeout=seconds,
            capture_output=True,
            text=True,
        )
        if run.returncode == 5 and not share.startswith("0/"):  # no case is left for it
            return Counter()
        if run.returncode not in (0, 1):  # 1: of tests that fail
            print(run.stdout[-1500:], run.stderr[-1500:])
    except subprocess.TimeoutExpired:
        print(f"{copy.name}: out of time")
        if not found.exists():
            return Counter()
    if not found.exists():
        return Counter(failed=1)
    counts, failures, why_skipped = json.loads(found.read_text())
    print(*(f"failed: {x}" for x in failures), sep="\n")
    print(*(f"skipped {n}: {x}" for x, n in why_skipped.items()), sep="\n")
    return Counter(counts)


def commit_of(checkout: Path) -> str:
    asked = ["git", "-C", str(checkout), "rev-parse", "--show-toplevel", "--short", "HEAD"]
    top, _, commit = subprocess.run(asked, capture_output=True, text=True).stdout.partition("\n")
    return commit.strip() if top == str(checkout) else ""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    options.add_argument("checkout", type=Path)
    options.add_argument("--only", default="", help="files with this in their name")
    options.add_argument("--sample", type=int, default=0, help="so many cases of each file")
    options.add_argument("--seconds", type=float, default=3600, help="a file may take")
    options.add_argument("--jobs", type=int, default=1, help="files at a time")
    options.add_argument("--processes", type=int, default=1, help="that share a file's cases")
    options.add_argument("--commit", help="of a checkout that is no clone")
    options.add_argument("--csv", type=Path, help="where rows are appended")
    given = options.parse_args()
    checkout = given.checkout.resolve()
    package = next((x for x in SUITES if (checkout / x).is_dir()), None)
    if package is None:
        options.error(f"{checkout}: no package of {', '.join(SUITES)} is there")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    row = {"date": time.strftime("%Y-%m-%d"), "device": device, "torch": torch.__version__}
    row |= {"package": package, "commit": given.commit or commit_of(checkout)}

    def measure(path: Path) -> dict[str, Any]:
        begin = time.perf_counter()
        each = given.sample, given.seconds, given.processes
        found = run_file(checkout, package, path, *each)
        cells = row | {"file": str(path.relative_to(checkout)), "cases": given.sample or "all"}
        cells |= {x: found[x] for x in ("passed", "failed", "skipped")}
        return cells | {"seconds": round(time.perf_counter() - begin)}

    paths = sorted(x for pattern in SUITES[package] for x in checkout.glob(pattern))
    paths = [x for x in paths if package != "fla" or not re.fullmatch(OMITTED, x.name)]
    failed = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        for cells in pool.map(measure, [x for x in paths if given.only in x.name]):
            print(*(f"{x} {cells[x]}" for x in COLUMNS[3:]), sep=", ", flush=True)
            failed += cells["failed"]
            if given.csv:
                write_row(given.csv, cells)
    return 1 if failed else 0


def write_row(path: Path, cells: dict[str, Any]) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(cells)


if __name__ == "__main__":
    sys.exit(main())
