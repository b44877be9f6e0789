"""The layer between public functions and kernels: choice, registration, guards, caches,
launches."""

from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")


def warm_up(call: Callable[[], R]) -> R:
    """Runs a call and waits until every kernel that its operators want in any size is compiled.

    A call alone waits for its own kernels; those that other numbers of tokens, rows or sequences
    ask for are compiled meanwhile and after it. To have them all before requests come:

        slipstream.runtime.warm_up(lambda: model.generate(prompt, max_new_tokens=4))

    Args:
        call: takes no arguments; operators of slipstream run in it, on CUDA tensors. What has to be
            warm has to occur in it: a backward, a packed row, a token after a prompt.

    Returns:
        What call returns. Costs as much as the compilers take; nothing where all is in Triton's
        cache, without Triton, and on a CPU. compilations() should not rise afterwards.
    """
    from slipstream.runtime.compile_ahead import finish

    result = call()
    finish()
    return result


def compilations() -> int:
    """Counts the kernel variants that this process has compiled or taken from Triton's cache.

    After a model's first steps it should not rise: a variant that is new then is compiled in the
    middle of a run. 0 without Triton, and in its interpreter.
    """
    from slipstream.runtime.launch_cache import count_variants

    return count_variants()
