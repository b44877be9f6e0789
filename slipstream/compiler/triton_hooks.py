"""Where Triton tells of what it compiles and launches: triton.knobs."""

from collections.abc import Callable
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
