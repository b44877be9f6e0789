"""flash_attn's functions on Slipstream's attention, on a CPU too.

    from slipstream.compat.flash_attn import flash_attn_qkvpacked_func

Names, positional order, defaults and keywords are those of flash_attn 2.8; those of
FlashAttention-3 are in slipstream.compat.flash_attn_interface. The differences are in
docs/guides/migrate_flash_attn.md.
"""

from slipstream.compat.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

# the release whose names and arguments these are
__version__ = "2.8.4"
