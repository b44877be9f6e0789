"""Linear layers of the few rows that a decoding step has: norm, products, gate and residual."""
