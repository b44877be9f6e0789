"""flash-linear-attention's modules on Slipstream's operators: fla.ops, fla.modules, fla.utils."""

# the release whose names and arguments these are
__version__ = "0.6.0"
