"""causal_conv1d's functions on Slipstream's short convolution, on a CPU too.

    from slipstream.compat.causal_conv1d import causal_conv1d_fn

Names, positional order, defaults and keywords are those of causal_conv1d 1.7. The differences are
in docs/guides/migrate_causal_conv1d.md.
"""

from slipstream.compat.causal_conv1d.causal_conv1d_interface import (
    causal_conv1d_fn,
    causal_conv1d_update,
)

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]

# the release whose names and arguments these are
__version__ = "1.7.0"
