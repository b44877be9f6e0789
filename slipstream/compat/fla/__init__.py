"""flash-linear-attention's modules on Slipstream's operators: fla.ops, fla.modules, fla.utils.

    from slipstream.compat.fla.ops.gated_delta_rule import chunk_gated_delta_rule

Names, positional order, defaults and keywords are those of fla-core 0.6.0. Where Slipstream cannot
honour an argument it raises NotImplementedError with the argument's name. The differences are in
docs/guides/migrate_fla.md.
"""

from slipstream.compat.fla.paths import make_modules

# the release whose names and arguments these are
__version__ = "0.6.0"

make_modules()
