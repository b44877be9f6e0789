"""Decay per channel with an erase (KDA, DPLR, RWKV-7) on sm_90."""
