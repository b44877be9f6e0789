"""Decay per channel with an erase (KDA, DPLR, RWKV-7) in Triton."""
