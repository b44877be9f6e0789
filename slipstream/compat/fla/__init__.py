"""flash-linear-attention's modules on Slipstream's operators: fla.ops, fla.modules, fla.utils.

    from slipstream.compat.fla.ops.gated_delta_rule import chunk_gated_delta_rule

Names, positional order, defaults and keywords are those of fla-core 0.6.0. Where Slipstream cannot
honour an argument it raises NotImplementedError with the argument's name. The differences are in
docs/guides/migrate_fla.md.
"""

import importlib
import sys
from typing import Any

from slipstream.compat.fla.paths import make_modules

# the release whose names and arguments these are
__version__ = "0.6.0"

make_modules()


def imported_as_peer() -> None:
    """Does what `import fla` does: imports fla's layers and models, which register with
    transformers' Auto classes, where their files are there."""
    for peer in ("fla.layers", "fla.models"):
        try:
            importlib.import_module(peer)
        except ModuleNotFoundError as error:
            if error.name != peer:
                raise


def __getattr__(name: str) -> Any:
    """A layer or a model, while this is imported as fla."""
    for peer in ("fla.layers", "fla.models"):
        if sys.modules.get("fla") is sys.modules[__name__] and hasattr(sys.modules.get(peer), name):
            return getattr(sys.modules[peer], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
