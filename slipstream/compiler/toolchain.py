"""Which compilers are here, and the right ptxas among them.

Triton brings a ptxas of its own; where compiler/known_bugs.py knows it for faulty and a better one
is installed, that one is selected, by TRITON_PTXAS_PATH, before the first compilation: PyPI's
nvidia-cuda-nvcc (`pip install slipstream[cuda]`), else a CUDA toolkit's. A path that the user has
set stays, if it runs. Triton has a second, ptxas-blackwell, for sm_100 and later, and from 3.9 on
for sm_90 too.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from slipstream.compiler.known_bugs import applying, version

VARIABLE = "TRITON_PTXAS_PATH"
BLACKWELL = "TRITON_PTXAS_BLACKWELL_PATH"


@cache
def triton_version() -> str | None:
    """Triton's version, without importing Triton."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def ptxas_version(path: str) -> str | None:
    """ "12.8.93" of an executable, None if it does not run."""
    try:
        out = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    match = re.search(r"V(\d+\.\d+\.\d+)", out.stdout)
    return match[1] if match else None


def takes_blackwell(arch: str, triton: str | None) -> bool:
    """Whether this release of Triton assembles for an architecture by its ptxas-blackwell."""
    first = 90 if triton and version(triton)[:2] >= (3, 9) else 100
    return arch.startswith("sm_") and int(arch[3:]) >= first


def ptxas_path(arch: str) -> str | None:
    """The ptxas that Triton would run for an architecture; None for AMD or without Triton."""
    if not arch.startswith("sm_"):
        return None
    return _path(takes_blackwell(arch, triton_version()))


def _path(blackwell: bool) -> str | None:
    """One of Triton's two, or what stands for it by an environment variable."""
    variable = BLACKWELL if blackwell else VARIABLE
    if (from_environment := os.environ.get(variable)) and ptxas_version(
        from_environment
    ) is not None:
        return from_environment
    bundled = _bundled()
    if bundled is None:
        return None
    bundled_ptxas = bundled / "ptxas-blackwell"
    return str(bundled_ptxas if blackwell and bundled_ptxas.exists() else bundled / "ptxas")


def select_ptxas(archs: tuple[str, ...], driver: int | None = None) -> str | None:
    """Points Triton to another ptxas if its own is known faulty for one of `archs`. Returns why.

    Not if another of them is an architecture that this ptxas has dropped, and none of a later CUDA
    than the driver's, which might not load what it makes.

    Args:
        driver: the major version of CUDA that it is for; None does not ask.
    """
    triton = triton_version()
    if triton is None:
        return None
    for variable in (VARIABLE, BLACKWELL):
        _drop_broken(variable)
    if VARIABLE in os.environ:
        return None
    for path in installed_ptxas():
        release = ptxas_version(str(path))
        if release is None or (driver is not None and version(release)[0] > driver):
            continue
        if cured := _cured_bugs(archs, triton, release):
            os.environ[VARIABLE] = str(path)
            return f"ptxas {release} of {_origin(path)}: {', '.join(sorted(cured))}"
    return None


def _drop_broken(variable: str) -> None:
    from_environment = os.environ.get(variable)
    if from_environment is not None and ptxas_version(from_environment) is None:
        del os.environ[variable]
        text = f"{variable}: {from_environment!r} does not run as ptxas; Slipstream chooses another"
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _cured_bugs(archs: tuple[str, ...], triton: str, other: str) -> set[str]:
    """The faults that a later ptxas has not; none if it has others, or is no later."""
    cured: set[str] = set()
    for arch in archs:
        bundled_ptxas = ptxas_path(arch)
        if bundled_ptxas is None or takes_blackwell(arch, triton):
            continue
        bundled_version = ptxas_version(bundled_ptxas)
        before, after = (_known_bugs(arch, triton, x) for x in (bundled_version, other))
        if after - before or version(other) <= version(bundled_version or ""):
            return set()
        cured |= before - after
    return cured


def selected(arch: str) -> str:
    """Whose ptxas is taken for an architecture, "Triton's own" if its variable is not set."""
    from_environment = os.environ.get(
        BLACKWELL if takes_blackwell(arch, triton_version()) else VARIABLE
    )
    return "Triton's own" if from_environment is None else f"{_origin(Path(from_environment))}'s"


def _origin(path: Path) -> str:
    if "triton" in path.parts:
        return "Triton"
    return "nvidia-cuda-nvcc" if "nvidia" in path.parts else f"the toolkit at {path.parent.parent}"


def driver() -> int | None:
    """The major version of CUDA that the driver is for."""
    import torch

    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    return ask() // 1000 if ask is not None and torch.cuda.is_available() else None


def _known_bugs(arch: str, triton: str, ptxas: str | None) -> set[str]:
    """Names of those that this ptxas has; none if it is unknown."""
    if ptxas is None:
        return set()
    return {x.name for x in applying(arch, triton, ptxas) if x.ptxas is not None}


def installed_ptxas() -> list[Path]:
    """The ptxas besides Triton's own: nvidia-cuda-nvcc's, then the toolkits', newest first."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        spec = None
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    packaged = [y for x in places for y in Path(x).glob("cu*/bin/ptxas")]
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    toolkits = [x for r in roots if r and (x := Path(r) / "bin/ptxas").exists()]
    if on_path := shutil.which("ptxas"):
        toolkits.append(Path(on_path))
    return [*_newest_first(packaged), *_newest_first(toolkits)]


def _newest_first(paths: list[Path]) -> list[Path]:
    working = {x: version(v) for x in paths if (v := ptxas_version(str(x)))}
    return sorted(working, key=lambda x: working[x], reverse=True)


def _bundled() -> Path | None:
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "backends/nvidia/bin"
    return path if (path / "ptxas").exists() else None


def ptxas_of(arch: str, compilers: Mapping[str, str]) -> str:
    """The version of the ptxas for an architecture, of what `versions` says."""
    if not arch.startswith("sm_"):
        return ""
    blackwell = takes_blackwell(arch, compilers["triton"])
    return compilers["ptxas_blackwell" if blackwell else "ptxas"]


def versions() -> dict[str, str]:
    """The versions of Triton and of its two ptxas."""
    by_name = {"triton": triton_version() or ""}
    for name, blackwell in (("ptxas", False), ("ptxas_blackwell", True)):
        path = _path(blackwell)
        by_name[name] = (path and ptxas_version(path)) or ""
    return by_name
