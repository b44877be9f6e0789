"""Keys times factors that follow the decayed sums of their squares (preconditioned delta rules)."""
