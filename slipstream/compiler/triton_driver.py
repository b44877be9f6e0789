"""Triton's driver for CUDA before its C part is there, and its hooks (triton.knobs).

The first launch, also one that only compiles, makes Triton build a C module with the host's
compiler: 0.2 to 1.8 s in which nothing else happens. Kernels are compiled without it; it is wanted
when the first of them is loaded. Here a thread builds it meanwhile.
"""

import contextlib
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any


def compile_hook() -> tuple[Any, str]:
    """The object, and the attribute of it that is called before the JIT compiles a kernel."""
    from triton import knobs

    return knobs.runtime, "jit_cache_hook"


def before_compiling(hook: Callable[..., Any]) -> Callable[[], None]:
    """hook(fn=, compile=, ...) is called too, after the one that is there unless that one stops
    the compilation by returning True. Returns the way back."""
    where, name = compile_hook()
    before = getattr(where, name)

    def both(**event: Any) -> Any:
        return (before is not None and before(**event)) or hook(**event)

    setattr(where, name, both)
    return lambda: setattr(where, name, before)


# In this release a driver is made as below.
RELEASE = "3.6."


def begin() -> Callable[[], object]:
    """Gives Triton a driver if it has none yet. What is returned builds the C part, for a thread;
    whoever wants it before that waits."""
    with contextlib.suppress(Exception):
        from triton import __version__
        from triton.backends.nvidia.driver import CudaDriver
        from triton.runtime import driver

        config: Any = driver
        untouched = config._active is None and config._default is None
        if untouched and __version__.startswith(RELEASE) and CudaDriver.is_active():
            early = _driver()
            config.set_active(early)
            return lambda: early.utils
    return lambda: None


def _driver() -> Any:
    from triton.backends.driver import GPUDriver
    from triton.backends.nvidia import driver as nvidia

    class EarlyDriver(nvidia.CudaDriver):
        def __init__(self) -> None:
            self._lock = threading.Lock()
            GPUDriver.__init__(self)

        def launcher_cls(self, src: Any, metadata: Any) -> Any:
            """A launcher. Its module reads the type of descriptors for TMA once, when it is loaded,
            and the C part brings that type: so it is waited for."""
            assert self.utils is not None
            return nvidia.CudaLauncher(src, metadata)

        @cached_property
        def utils(self) -> Any:
            """The C part. Where it cannot be built, whoever asks is told why, each time."""
            with self._lock:
                if "utils" not in vars(self):
                    vars(self)["utils"] = nvidia.CudaUtils()
            return vars(self)["utils"]

    return EarlyDriver()
