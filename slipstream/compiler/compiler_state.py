"""The compilers for one GPU architecture here, and what was learnt of them.

Verdicts outlive the process: in verdicts.json, by everything that decides what a kernel is compiled
to (release, kernels' sources, architecture, Triton, ptxas). Where tools/matrix.py has verified a
family of kernels on such a combination (verified.json, with a digest of the family's sources),
nothing is watched: a kernel that has changed since is as unverified as a new compiler.

    SLIPSTREAM_GUARD   auto (unverified combinations), off, always
    SLIPSTREAM_PROBE   once (the first use on an unverified combination compares with plain torch,
                       and is remembered), always (once in every process, everywhere), off
"""

import contextlib
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from slipstream.compiler import aot, known_bugs, source_digest, toolchain, triton_driver
from slipstream.compiler import arch as arches
from slipstream.compiler.compile_worker import TIMEOUT, Worker
from slipstream.compiler.known_bugs import CORE, FEATURE_RULES, describe, family, features_of
from slipstream.compiler.known_bugs import KernelKey as KernelKey
from slipstream.runtime.files import write_text

# The folder of kernels/ with what several families share.
PRIMITIVES = "primitives"
# The folder of kernels whose files are families of their own.
ELEMENTWISE = "elementwise"


class Unusable(RuntimeError):
    """A kernel that this machine's compilers cannot make, or make wrong; its text says why.

    lasting: whether it holds for later processes, too.
    """

    def __init__(self, reason: str, lasting: bool = True) -> None:
        super().__init__(reason)
        self.lasting = lasting


class KernelDisabledWarning(RuntimeWarning):
    """An implementation is not used on this machine."""


def cache_dir() -> Path:
    """Where verdicts are remembered: $SLIPSTREAM_CACHE_DIR, or slipstream in the user's cache."""
    if folder := os.environ.get("SLIPSTREAM_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "slipstream"


def home() -> Path:
    """The user's folder; where there is no such user, as in a container with any uid, one in the
    folder for temporary files.

    Raises:
        OSError: there is neither.
    """
    try:
        return Path.home()
    except RuntimeError:
        place = Path(tempfile.gettempdir()) / f"slipstream-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        place.mkdir(mode=0o700)
    if place.lstat().st_uid != os.getuid():
        raise PermissionError(f"{place} belongs to another user")  # who could leave kernels there
    return place


def triton_cache() -> Path:
    """Where Triton leaves what it compiles."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or home() / ".triton/cache")


def select_cache() -> None:
    """Gives Triton a folder for temporary files where its own cannot be written."""
    place = None
    try:
        place = triton_cache()
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
        # Triton itself knows no home but the user's
        if not os.path.isabs(os.path.expanduser("~")):
            os.environ["TRITON_CACHE_DIR"] = str(place)
    except OSError as error:
        try:
            fallback = tempfile.mkdtemp(prefix="slipstream-triton-")
        except OSError:
            return  # what needs to be compiled then runs in plain torch
        os.environ["TRITON_CACHE_DIR"] = fallback
        text = f"Triton's cache {place or ''} cannot be written ({error}); {fallback} is used"
        warnings.warn(text, KernelDisabledWarning, stacklevel=3)


def verdicts_file() -> Path:
    return cache_dir() / "verdicts.json"


@cache
def verified() -> dict[tuple[str, str, str], frozenset[str]]:
    """The families that `tools/matrix.py --record` found sound and whose kernels are still the
    same, by (arch, Triton, ptxas)."""
    rows = json.loads((Path(__file__).parent / "verified.json").read_text())

    def unchanged_families(row: dict[str, Any]) -> frozenset[str]:
        now = families(uses_gluon(row["arch"], row["triton"]))
        return frozenset(
            name for name, digest in row["families"].items() if now.get(name) == digest
        )

    return {(x["arch"], x["triton"], x["ptxas"]): unchanged_families(x) for x in rows}


def uses_gluon(arch: str, triton: str) -> bool:
    """Whether kernels in Gluon, those of folders and files of sm90, are taken there."""
    first, last = arches.GLUON_RELEASES
    return arch == "sm_90" and first <= known_bugs.version(triton)[:2] <= last


@cache
def families(gluon: bool = True) -> dict[str, str]:
    """A digest of each family's kernels and of how they are launched.

    gluon: those in Gluon, too.
    """
    return source_digest.digests(files_of(gluon), cache_dir() / "source_digests.json")


def files_of(gluon: bool) -> dict[str, list[Path]]:
    """The modules that `families` are of."""
    root = Path(__file__).parents[1]
    shared = [root / "runtime/backends.py", *(root / "kernels" / PRIMITIVES).glob("*.py")]
    paths_of = {CORE: [root / "runtime/token_ids_kernel.py", *shared]}
    for folder in (root / "kernels").iterdir():
        if (folder / "__init__.py").exists() and folder.name != PRIMITIVES:
            paths = [x for x in folder.rglob("*.py") if not _is_plain_torch(x, folder)]
            others = [x for x in paths if not x.relative_to(folder).parts[0].startswith("sm90")]
            if folder.name == ELEMENTWISE:
                paths_of |= _by_operator(folder, paths, paths if gluon else others, shared)
            else:
                paths_of[folder.name] = [*(paths if gluon else others), *shared]
    # which launches kernels of attention, and calls its device functions
    borrowed = [x for x in paths_of["attention"] if x.parent.name in ("triton", "sm90")]
    paths_of["selected_attention"] = [*paths_of["selected_attention"], *borrowed]
    return paths_of


def _by_operator(
    folder: Path, every: list[Path], paths: list[Path], shared: list[Path]
) -> dict[str, list[Path]]:
    """A family for each name of a file of kernels. It has the files whose names begin with that
    name, and those that belong to no family: inputs of several."""
    names = {x.stem for x in every if x.parent != folder} - {"__init__"}
    of = {x: next((n for n in names if x.stem.startswith(n)), None) for x in paths}
    common = [x for x, name in of.items() if name is None]
    return {n: [*(x for x, name in of.items() if name == n), *common, *shared] for n in names}


def _is_plain_torch(path: Path, family: Path) -> bool:
    """Whether a module is plain torch, which decides nothing about kernels."""
    return path.relative_to(family).parts[0].startswith(("eager", "reference", "fallback"))


@cache
def sources() -> str:
    """A digest of the kernels: a verdict on other ones is none on these."""
    text = json.dumps(families(), sort_keys=True)
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:12]


def family_of(module: str) -> str:
    """The family of a kernel's module: "linear" for
    "slipstream.kernels.linear.triton.scalar_decay.chunk"."""
    _, _, inside = module.partition(".kernels.")
    folder = inside.partition(".")[0]
    if folder == ELEMENTWISE:
        return inside.rpartition(".")[2]
    return CORE if folder in ("", PRIMITIVES) else folder


def _wants(variable: str, default: str, needed: bool) -> bool:
    """Whether a variable that is the default, "off" or "always" asks for what it is about."""
    value = os.environ.get(variable, default)
    if value not in (default, "always", "off"):
        raise ValueError(f"{variable}: want {default}, off, always, got {value!r}")
    return value == "always" or (value == default and needed)


class CompilerState:
    """unguarded: no kernel is guarded, probed or known to be wrong, so callers skip the checks.

    verified: families of kernels that the matrix has seen with these compilers, as they are now.
    unverified: the others. guards, probes: whether anything is compiled in the child first, or
    compared.

    wide: dtypes whose products want operands in float32, since the compiler fails at them.
    accepted: kinds that need no further look. probing: those that a probe is at.

    Args:
        passive: for tools that plan for a GPU that is not here: nothing is guarded or probed.
        remembers: what was learnt here before counts.
    """

    def __init__(
        self, arch: str, triton: str, ptxas: str, *, passive: bool = False, remembers: bool = True
    ) -> None:
        self.arch, self.triton, self.ptxas = arch, triton, ptxas
        self.verified = verified().get((arch, triton, ptxas), frozenset())
        self.unverified = frozenset(families()) - self.verified
        doubted = not passive and any(self._suspected(x.triggers) for x in FEATURE_RULES)
        unknown = bool(self.unverified)
        self.guards = not passive and _wants("SLIPSTREAM_GUARD", "auto", unknown)
        self.probes = not passive and _wants("SLIPSTREAM_PROBE", "once", unknown or doubted)
        self.accepted: set[KernelKey] = set()
        self.probing: set[KernelKey] = set()
        self._worker = Worker()
        self._said: set[KernelKey] = set()
        self._passing = False  # whether something is unusable in this process alone
        self._reasons: dict[KernelKey, str | None] = {}
        self._verdicts: dict[str, dict[str, str]] = {}
        if remembers:
            self._verdicts = self._read().get(self.name, {})
        every = {y for x in FEATURE_RULES for y in x.triggers}
        self._blocked = known_bugs.blocking(arch, triton, ptxas or None, every) is not None
        self._settle()

    def _settle(self) -> None:
        self.unguarded = not (
            self.guards
            or self.probes
            or self._blocked
            or self._passing
            or self._verdicts.get("unusable")
        )

    @property
    def trust(self) -> str:
        """Which kernels are verified, in words."""
        if not self.unverified:
            return "verified by the support matrix"
        if not self.verified:
            return "not verified by the support matrix"
        families = ", ".join(sorted(self.unverified))
        return f"verified by the support matrix, except for the kernels of {families}"

    @property
    def name(self) -> str:
        from slipstream import __version__

        versions = f"triton {self.triton} ptxas {self.ptxas}"
        return f"slipstream {__version__} {sources()} {self.arch} {versions}"

    def unusable(self, kind: KernelKey) -> str | None:
        """Why these kernels are not used here, or None."""
        try:
            return self._reasons[kind]
        except KeyError:
            reason = self._verdicts.get("unusable", {}).get(describe(kind))
        if reason is None and (fault := self._fault(kind)):
            reason = _reason(fault)
        self._reasons[kind] = reason
        return reason

    def _fault(self, kind: KernelKey) -> known_bugs.KnownBug | None:
        """One that these kernels meet by what they are and by their dtypes."""
        return known_bugs.blocking(self.arch, self.triton, self.ptxas or None, features_of(kind))

    def _suspected(self, triggers: Collection[str]) -> known_bugs.KnownBug | None:
        """One that only results can show."""
        return known_bugs.suspected(self.arch, self.triton, self.ptxas or None, triggers)

    @property
    def remembered(self) -> dict[str, dict[str, str]]:
        """ "unusable" and "probed": kind, in words -> why."""
        return self._verdicts

    def mark_unusable(self, kind: KernelKey, reason: str, lasting: bool = True) -> None:
        """Stops using these kernels; with `lasting` in later processes too."""
        self._reasons[kind] = reason
        self.accepted.discard(kind)
        if lasting:
            self._learn("unusable", kind, reason)
        else:
            self._passing = True
            self._settle()

    def should_probe(self, kind: KernelKey) -> bool:
        """Whether a probe is still to be made."""
        if not self.probes:
            return False
        if os.environ.get("SLIPSTREAM_PROBE") == "always":
            return True
        if family(kind) in self.verified and not self._suspected(features_of(kind)):
            return False
        return describe(kind) not in self._verdicts.get("probed", {})

    def probed(self, kind: KernelKey) -> None:
        self._learn("probed", kind, "agrees")

    def warn_fallback(self, kind: KernelKey, reason: str) -> None:
        """Warns once a process."""
        if kind in self._said:
            return
        self._said.add(kind)
        text = f"{describe(kind)} is not used on {self.arch} with Triton {self.triton}: {reason}"
        warnings.warn(
            f"{text}. Forget it with `slipstream doctor --forget`",
            KernelDisabledWarning,
            stacklevel=3,
        )

    def compiles(self, module: str, name: str, compile: dict) -> None:
        """Compiles in the child what the JIT is about to, unless it is verified; Unusable if that
        goes wrong."""
        always = os.environ.get("SLIPSTREAM_GUARD") == "always"
        if not always and family_of(module) in self.verified:
            return
        job = aot.job_of(module, name, compile, self.arch)
        if aot.cached(job):
            return
        outcome = self._worker.compile(job, TIMEOUT)
        if outcome.status == "absent":
            advice = "SLIPSTREAM_GUARD=off compiles without one"
            raise Unusable(f"{name}: {outcome.reason}; {advice}", lasting=False)
        if outcome.status != "ok":
            raise Unusable(f"{name}: {outcome.reason}")

    def _learn(self, what: str, kind: KernelKey, text: str) -> None:
        from filelock import FileLock  # 10 ms of the import, which few need

        self._verdicts.setdefault(what, {})[describe(kind)] = text
        self._settle()
        # a read-only home must not stop the work: then each process learns it again
        with contextlib.suppress(OSError):
            path = verdicts_file()
            path.parent.mkdir(parents=True, exist_ok=True)
            # another process that writes down what it has learnt is waited for
            with FileLock(path.with_suffix(".lock"), timeout=10.0):
                everything = self._read()  # others learn, too
                verdicts_of_state = everything.setdefault(self.name, {})
                for name, verdicts in self._verdicts.items():
                    verdicts_of_state[name] = {**verdicts_of_state.get(name, {}), **verdicts}
                self._verdicts = verdicts_of_state
                write_text(path, json.dumps(everything, indent=1))

    @staticmethod
    def _read() -> dict[str, dict[str, dict[str, str]]]:
        """The verdicts on disk, without those that are not as they were written."""
        try:
            stored = json.loads(verdicts_file().read_text())
        except (OSError, ValueError):
            return {}
        return {
            name: {k: v for k, v in verdicts.items() if isinstance(v, dict)}
            for name, verdicts in (stored.items() if isinstance(stored, dict) else ())
            if isinstance(verdicts, dict)
        }


def interpreter_failure(kind_of: Callable[[], KernelKey]) -> str | None:
    """The known fault of these kernels in Triton's interpreter, or None; None outside of it."""
    if os.environ.get("TRITON_INTERPRET") != "1" or (triton := toolchain.triton_version()) is None:
        return None
    fault = known_bugs.blocking(known_bugs.INTERPRETER, triton, None, features_of(kind_of()))
    return None if fault is None else _reason(fault)


def _reason(fault: known_bugs.KnownBug) -> str:
    return f"{fault.pattern}: {fault.name}; {fault.way_out}"


@cache
def compiler_state(device: torch.device) -> CompilerState | None:
    """The compilers in use for a device; None where Triton's compiler is not used.

    The first time it selects the right ptxas and, where nothing is verified, sets the guard: so it
    has to be called before the first compilation for the device.
    """
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    triton = toolchain.triton_version()
    if triton is None or not torch.cuda.is_available():
        return None
    archs = [arch_of_device(torch.device("cuda", i)).name for i in range(torch.cuda.device_count())]
    toolchain.select_ptxas(tuple(archs), toolchain.driver())
    arch = arch_of_device(device).name
    return _of_arch(arch, triton, tuple(i for i, x in enumerate(archs) if x == arch))


@cache
def _of_arch(arch: str, triton: str, devices: tuple[int, ...]) -> CompilerState:
    select_cache()
    path = toolchain.ptxas_path(arch)
    state = CompilerState(arch, triton, (path and toolchain.ptxas_version(path)) or "")
    if state.guards:
        watch(state, devices=devices)
    return state


def arch_of_device(device: torch.device) -> arches.Arch:
    """The row of a CUDA or ROCm device; AMD's have gfx942's, under their own names."""
    hip = getattr(torch.version, "hip", None) is not None
    arch = arches.of(torch.cuda.get_device_capability(device), hip)
    if hip and (name := getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")):
        return replace(arch, name=name.partition(":")[0])
    return arch


def state_for(
    arch: str, remembers: bool = False, compilers: Mapping[str, str] | None = None
) -> CompilerState:
    """The compilers that are here, or others, as they would be for a GPU that is not: for tools."""
    compilers = compilers or toolchain.versions()
    ptxas = toolchain.ptxas_of(arch, compilers)
    return CompilerState(arch, compilers["triton"], ptxas, passive=True, remembers=remembers)


def watch(
    state: CompilerState, package: str = "slipstream.", devices: Container | None = None
) -> Callable[[], None]:
    """Before Triton's JIT compiles a kernel of `package`, for one of `devices` if given, the child
    does. Returns the way back."""

    def hook(*, fn: Any, compile: Any, **_: Any) -> None:
        served = devices is None or compile.get("device") in devices
        if served and fn.module.startswith(package):
            state.compiles(fn.module, fn.name, compile)

    return triton_driver.before_compiling(hook)
