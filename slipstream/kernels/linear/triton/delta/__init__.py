"""The delta rule in Triton."""
