"""flash-linear-attention's modules on Slipstream's operators: fla.ops, fla.modules, fla.utils.

    from slipstream.compat.fla.ops.gated_delta_rule import chunk_gated_delta_rule

Names, positional order, defaults and keywords are those of fla-core 0.6.0. Where Slipstream cannot
honour an argument it raises NotImplementedError with the argument's name. The differences are in
docs/guides/migrate_fla.md.
"""

import functools
import importlib
import inspect
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
    if "fla.models.generation_utils" in sys.modules:
        _rename_cache(sys.modules["fla.models.generation_utils"].FLAGenerationMixin)


def _rename_cache(mixin: Any) -> None:
    """generate() of transformers 5.24 says cache; models of fla 0.6.0 read past_key_values, pass
    over cache, and would see each new token alone."""
    prepare = mixin.prepare_inputs_for_generation

    @functools.wraps(prepare)
    def prepared(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare(self, *args, **kwargs)
        if "cache" in inputs and "cache" not in inspect.signature(self.forward).parameters:
            inputs["past_key_values"] = inputs.pop("cache")
        return inputs

    mixin.prepare_inputs_for_generation = prepared


def __getattr__(name: str) -> Any:
    """A layer or a model, while this is imported as fla."""
    for peer in ("fla.layers", "fla.models"):
        if sys.modules.get("fla") is sys.modules[__name__] and hasattr(sys.modules.get(peer), name):
            return getattr(sys.modules[peer], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
