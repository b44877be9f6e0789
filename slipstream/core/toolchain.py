"""Which compilers are here, and the right ptxas among them.

Triton brings a ptxas of its own; where core/faults.py knows it for faulty and PyPI's
nvidia-cuda-nvcc is installed (`pip install slipstream[cuda]`), that one is selected, by
TRITON_PTXAS_PATH, before the first compilation. A path that the user has set stays.
"""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
from functools import cache
from pathlib import Path

from slipstream.core.faults import applying, version

VARIABLE = "TRITON_PTXAS_PATH"


@cache
def triton_version() -> str | None:
    """Without importing it."""
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
    found = re.search(r"V(\d+\.\d+\.\d+)", out.stdout)
    return found[1] if found else None


def ptxas_path(arch: str) -> str | None:
    """The ptxas that Triton would run for an architecture; None for AMD or without Triton."""
    if not arch.startswith("sm_"):
        return None
    blackwell = int(arch[3:]) >= 100
    variable = "TRITON_PTXAS_BLACKWELL_PATH" if blackwell else VARIABLE
    if given := os.environ.get(variable):
        return given
    bundled = _bundled()
    if bundled is None:
        return None
    own = bundled / "ptxas-blackwell"
    return str(own if blackwell and own.exists() else bundled / "ptxas")


def select_ptxas(archs: tuple[str, ...]) -> str | None:
    """Points Triton to nvidia-cuda-nvcc's ptxas if its own is known faulty for one of `archs`.

    Not if another of them is an architecture that ptxas 13 has dropped. Returns why, or None.
    """
    other = installed_ptxas()
    triton = triton_version()
    if VARIABLE in os.environ or other is None or triton is None:
        return None
    found, found_version = str(other), ptxas_version(str(other))
    if found_version is None:
        return None
    for arch in archs:
        own = ptxas_path(arch)
        if own is None or int(arch[3:]) >= 100:
            continue
        cured = _faults(arch, triton, ptxas_version(own)) - _faults(arch, triton, found_version)
        worse = {
            name
            for x in archs
            for name in _faults(x, triton, found_version) - _faults(x, triton, ptxas_version(own))
        }
        if cured and not worse:
            os.environ[VARIABLE] = found
            return f"ptxas {found_version} of nvidia-cuda-nvcc: {', '.join(sorted(cured))}"
    return None


def _faults(arch: str, triton: str, ptxas: str | None) -> set[str]:
    """Names of those that this ptxas has; none if it is unknown."""
    if ptxas is None:
        return set()
    return {x.name for x in applying(arch, triton, ptxas) if x.ptxas is not None}


def installed_ptxas() -> Path | None:
    """nvidia-cuda-nvcc's, if it is installed."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return None
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    found = [y for x in places for y in Path(x).glob("cu*/bin/ptxas")]
    working = [(version(v), x) for x in found if (v := ptxas_version(str(x)))]
    return max(working)[1] if working else None


def _bundled() -> Path | None:
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "backends/nvidia/bin"
    return path if (path / "ptxas").exists() else None


def versions() -> dict[str, str]:
    """Of what compiles: Triton, and the ptxas for sm_90 and for sm_100."""
    found = {"triton": triton_version() or ""}
    for arch in ("sm_90", "sm_100"):
        path = ptxas_path(arch)
        found[f"ptxas_{arch}"] = (path and ptxas_version(path)) or ""
    return found
