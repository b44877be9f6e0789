"""What RWKV's time mixing does to tokens besides its recurrence."""
