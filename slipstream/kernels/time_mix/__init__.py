"""RWKV's time mixing, besides its recurrence."""
