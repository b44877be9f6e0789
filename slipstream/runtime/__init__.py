"""The layer between public functions and kernels: choice, registration, guards, caches,
launches."""


def compilations() -> int:
    """Counts the kernel variants that this process has compiled or taken from Triton's cache.

    After a model's first steps it should not rise: a variant that is new then is compiled in the
    middle of a run. 0 without Triton, and in its interpreter.
    """
    from slipstream.runtime.launch_cache import count_variants

    return count_variants()
