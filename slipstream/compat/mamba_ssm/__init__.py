"""mamba_ssm's functions on Slipstream's operators, on a CPU too.

    from slipstream.compat.mamba_ssm.ops.selective_scan_interface import selective_scan_fn

Names, positional order, defaults and keywords are those of mamba_ssm 2.3. The differences are in
docs/guides/migrate_mamba_ssm.md.
"""

from slipstream.compat.fixed import missing_names
from slipstream.compat.mamba_ssm.ops.selective_scan_interface import (
    mamba_inner_fn,
    selective_scan_fn,
)

__all__ = ["mamba_inner_fn", "selective_scan_fn"]

# the release whose names and arguments these are
__version__ = "2.3.2"

__getattr__ = missing_names(__name__, ("Mamba", "Mamba2", "Mamba3", "MambaLMHeadModel"))
