"""fla.ops: operators."""

from slipstream.compat.missing import missing_names

__getattr__ = missing_names(__name__, ("chunk_abc",))
