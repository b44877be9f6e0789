"""A compiler that nobody has verified for a GPU may kill the process: here it only kills a child.

For an (architecture, Triton, ptxas) that is not in verified.json, the first compilation of each
kernel happens in a child process, which leaves it in Triton's cache. If the child dies, hangs or
refuses, `attempt` takes the other implementation, says so once, and remembers it on disk.

    SLIPSTREAM_GUARD   auto (unverified combinations), off, always
    SLIPSTREAM_PROBE   once (the first use on an unverified combination compares with plain torch,
                       and is remembered), always (in every process, everywhere), off
"""

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from slipstream.core import arch as arches
from slipstream.core import toolchain
from slipstream.core.aot import cached, job_of
from slipstream.core.worker import Worker

T = TypeVar("T")
TIMEOUT = 300.0


class Unusable(RuntimeError):
    """A kernel that this machine's compilers cannot make, or make wrong; its text says why."""


class Guarded(RuntimeWarning):
    """An implementation is not used on this machine."""


def cache_dir() -> Path:
    """Where verdicts are remembered: $SLIPSTREAM_CACHE_DIR, or slipstream in the user's cache."""
    if given := os.environ.get("SLIPSTREAM_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"


def _setting(name: str, default: str, others: tuple[str, ...]) -> str:
    value = os.environ.get(name, default)
    if value not in (default, *others):
        raise ValueError(f"{name}: want {', '.join((default, *others))}, got {value!r}")
    return value


@cache
def verified() -> frozenset[tuple[str, str, str]]:
    """What `slipstream matrix --record` found sound: (arch, Triton, ptxas)."""
    rows = json.loads((Path(__file__).parent / "verified.json").read_text())
    return frozenset((x["arch"], x["triton"], x["ptxas"]) for x in rows)


class Machine:
    """The compilers for one architecture here, and what was learnt of them."""

    def __init__(self, arch: str, triton: str, ptxas: str) -> None:
        self.arch, self.triton, self.ptxas = arch, triton, ptxas
        self.verified = (arch, triton, ptxas) in verified()
        self._worker: Worker | None = None
        self._said: set[str] = set()
        self._probed: set[str] = set()
        self._verdicts = self._read().get(self.name, {})

    @property
    def name(self) -> str:
        from slipstream import __version__

        return f"slipstream {__version__} {self.arch} triton {self.triton} ptxas {self.ptxas}"

    @property
    def guards(self) -> bool:
        setting = _setting("SLIPSTREAM_GUARD", "auto", ("off", "always"))
        return setting == "always" or (setting == "auto" and not self.verified)

    def unusable(self, key: str) -> str | None:
        """Why an implementation is not used here, or None."""
        if not self._verdicts:
            return None
        return self._verdicts.get("unusable", {}).get(key)

    @property
    def remembered(self) -> dict[str, dict[str, str]]:
        """ "unusable" and "probed": key -> why."""
        return self._verdicts

    def demote(self, key: str, reason: str) -> None:
        self._learn("unusable", key, reason)

    @property
    def probes(self) -> bool:
        setting = _setting("SLIPSTREAM_PROBE", "once", ("off", "always"))
        return setting == "always" or (setting == "once" and not self.verified)

    def wants_probe(self, key: str) -> bool:
        """Whether a probe that `probes` allows is still to be made, and can be now."""
        if key in self._probed:
            return False
        if os.environ.get("SLIPSTREAM_PROBE") != "always" and key in self._verdicts.get(
            "probed", {}
        ):
            return False
        return not torch.cuda.is_current_stream_capturing() if torch.cuda.is_available() else True

    def probed(self, key: str) -> None:
        self._probed.add(key)
        self._learn("probed", key, "agrees")

    def say(self, key: str, reason: str) -> None:
        """A warning, once a process."""
        if key in self._said:
            return
        self._said.add(key)
        text = f"{key} is not used on {self.arch} with Triton {self.triton}: {reason}"
        warnings.warn(f"{text}. Forget it with `slipstream doctor --forget`", Guarded, stacklevel=3)

    def compiles(self, module: str, name: str, compile: dict) -> None:
        """Compiles in the child what the JIT is about to; Unusable if that goes wrong."""
        job = job_of(module, name, compile, self.arch)
        if cached(job):
            return
        if self._worker is None:
            self._worker = Worker()
        outcome = self._worker.compile(job, TIMEOUT)
        if outcome.status != "ok":
            raise Unusable(f"{name}: {outcome.reason}")

    def forget(self) -> None:
        _memory().unlink(missing_ok=True)
        self._verdicts = {}

    def _learn(self, kind: str, key: str, text: str) -> None:
        everything = self._read()
        self._verdicts = everything.setdefault(self.name, {})
        self._verdicts.setdefault(kind, {})[key] = text
        path = _memory()
        # a read-only home must not stop the work: then it is learnt anew by each process
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                json.dump(everything, file, indent=1)
            os.replace(file.name, path)

    @staticmethod
    def _read() -> dict[str, Any]:
        try:
            return json.loads(_memory().read_text())
        except (OSError, ValueError):
            return {}


def _memory() -> Path:
    return cache_dir() / "verdicts.json"


@cache
def machine(device: torch.device) -> Machine | None:
    """What compiles for a device; None where Triton's compiler is not used.

    The first time it selects the right ptxas and, where nothing is verified, sets the guard: so it
    has to be called before the first compilation for the device.
    """
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    triton = toolchain.triton_version()
    if triton is None:
        return None
    arch = of_device(device).name
    count = range(torch.cuda.device_count())
    toolchain.select_ptxas(tuple(of_device(torch.device("cuda", i)).name for i in count))
    path = toolchain.ptxas_path(arch)
    found = Machine(arch, triton, (path and toolchain.ptxas_version(path)) or "")
    if found.guards and arch in arches.ARCHS:
        watch(found)
    return found


def of_device(device: torch.device) -> arches.Arch:
    """The row of a CUDA or ROCm device."""
    hip = getattr(torch.version, "hip", None) is not None
    return arches.of(torch.cuda.get_device_capability(device), hip)


def watch(here: Machine, package: str = "slipstream.") -> Callable[[], None]:
    """Before Triton's JIT compiles a kernel of `package`, the child does. Returns the way back."""
    from triton import knobs

    runtime: Any = knobs.runtime
    before = runtime.jit_cache_hook

    def hook(*, fn: Any, compile: Any, **rest: Any) -> Any:
        if before is not None and (skip := before(fn=fn, compile=compile, **rest)):
            return skip
        if fn.module.startswith(package):
            here.compiles(fn.module, fn.name, compile)
        return None

    runtime.jit_cache_hook = hook

    def undo() -> None:
        runtime.jit_cache_hook = before

    return undo


def unusable(key: str, device: torch.device) -> str | None:
    """Why the implementation `key` is known not to work on a device: for plans. Cheap."""
    if torch.compiler.is_compiling():
        return None  # `attempt` looks when the graph runs
    here = machine(device)
    return None if here is None else here.unusable(key)


def attempt(
    key: str,
    device: torch.device,
    run: Callable[[], T],
    instead: Callable[[], T] | None = None,
    probe: Callable[[], str | None] | None = None,
    variant: Callable[[], str] = str,
) -> T:
    """run(), or instead() where this machine's compilers fail at it.

    Args:
        key: of the implementation, "linear.triton"; what is remembered.
        instead: None where the user asked for this implementation by name.
        probe: compares a small fresh problem with plain torch; says what differs, or None.
        variant: what the probe depends on besides the key, such as dtype and widths.

    Raises:
        NotImplementedError: it failed, and there is no `instead`.
    """
    here = machine(device)
    if here is None:
        return run()
    reason = here.unusable(key)
    if reason is None:
        try:
            if probe is not None and here.probes:
                _probe(here, f"{key} {variant()}", probe)
            return run()
        except Unusable as error:
            reason = str(error)
            here.demote(key, reason)
    if instead is None:
        raise NotImplementedError(f"{key}: {reason}; impl=None chooses another")
    here.say(key, reason)
    return instead()


def _probe(here: Machine, key: str, probe: Callable[[], str | None]) -> None:
    if not here.wants_probe(key):
        return
    if found := probe():
        raise Unusable(f"wrong result: {found}{_suspects(here)}")
    here.probed(key)


def _suspects(here: Machine) -> str:
    from slipstream.core.faults import applying

    found = applying(here.arch, here.triton, here.ptxas or None)
    names = [f"{x.name} ({x.way_out})" for x in found if x.effect == "wrong result"]
    return f"; known of these compilers: {', '.join(names)}" if names else ""
