"""Slipstream's entry points in vLLM and SGLang, which call them in each of their processes.

They do nothing, and import nothing, where a variable does not ask for it:

    SLIPSTREAM_VLLM=1    slipstream.integrations.vllm.register()
    SLIPSTREAM_SGLANG=1  slipstream.integrations.sglang.register_builtin()

This module is outside of the package, whose import imports torch. An engine goes on with its own
kernels where ours cannot be put in their place: one line of the log says why.
"""

import logging
import os
from importlib import import_module

logger = logging.getLogger(__name__)


def vllm() -> None:
    """For the group vllm.general_plugins, which may call it again, in threads and after a fork."""
    _register("SLIPSTREAM_VLLM", "slipstream.integrations.vllm", "register")


def sglang() -> None:
    """For the group sglang.srt.plugins."""
    for kind in ("gdn", "kda", "mamba2", "lightning"):
        _register("SLIPSTREAM_SGLANG", "slipstream.integrations.sglang", "register_builtin", kind)


def _register(variable: str, module: str, function: str, *kinds: str) -> None:
    asked = os.environ.get(variable, "0")
    if asked == "0":
        return
    what = " ".join((module, *kinds))
    if asked != "1":
        logger.warning("%s is not used: %s is 0 or 1, got %r", what, variable, asked)
        return
    # whatever an engine of another release has in another place: it is the engine that goes on
    try:
        getattr(import_module(module), function)(*kinds)
    except Exception as error:
        logger.warning("%s is not used: %s: %s", what, type(error).__name__, error)
