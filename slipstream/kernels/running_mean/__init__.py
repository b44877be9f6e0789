"""Means of all tokens so far by weights of exponentials (RWKV-4)."""
